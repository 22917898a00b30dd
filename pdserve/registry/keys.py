"""The key scheme of the registry, relative to the namespace. Instance ids hold no slash; model names may."""

from pdserve.contract.records import Adapter, Instance, Role, SlotState

INSTANCES = "instances/"
CARDS = "models/"
SETTINGS = "settings/"
NEWCOMERS = "newcomers/"
"""workers that cannot serve yet; only the workers that warm up with them read these"""
SLOTS = "slots/"
LEADERS, FOLLOWERS = "leaders/", "followers/"
"""the hosts of workers that span hosts, by the place where these meet; only they read these"""
ADAPTERS, LOADING = "adapters/", "loading/"
"""LoRA adapters, kept for workers that come later; those that a frontend is asking the workers for, under its lease"""
CLAIMS = "claims/"
"""names that a frontend is loading an adapter by, under its lease: there is one key for all models"""
FILE = "file"
"""path of the file that the settings were set on, where `serve` runs its own etcd"""


def instances(role: Role) -> list[str]:
    """Return the prefixes of the keys of all processes that do the work of this role."""
    return [f"{INSTANCES}{each.value}/" for each in Role if each.includes(role)]


def instance(process: Instance) -> str:
    return f"{INSTANCES}{process.role.value}/{process.id}"


def newcomer(worker: Instance) -> str:
    return f"{NEWCOMERS}{worker.role.value}/{worker.id}"


def leaders(place: str) -> str:
    return f"{LEADERS}{place}/"


def leader(place: str, instance_id: str) -> str:
    return f"{leaders(place)}{instance_id}"


def followers(place: str) -> str:
    return f"{FOLLOWERS}{place}/"


def follower(place: str, instance_id: str) -> str:
    return f"{followers(place)}{instance_id}"


def card(model: str, instance_id: str) -> str:
    return f"{CARDS}{model}/{instance_id}"


def adapter(kept: Adapter) -> str:
    return f"{ADAPTERS}{kept.model}/{kept.name}"


def loading(asked: Adapter) -> str:
    return f"{LOADING}{asked.model}/{asked.asked}"


def claim(name: str) -> str:
    return f"{CLAIMS}{name}"


def setting(name: str) -> str:
    return f"{SETTINGS}{name}"


def slot(state: SlotState) -> str:
    return f"{SLOTS}{state.host}/{state.name}" + f"/{state.model}" * bool(state.model)


def split_card(key: str) -> tuple[str, str]:
    """Return the model name and the instance id of a card's key."""
    model, _, instance_id = key.removeprefix(CARDS).rpartition("/")
    return model, instance_id
