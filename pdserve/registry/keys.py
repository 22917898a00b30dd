"""Keys of the registry, relative to the namespace. Instance ids contain no slash, model names may."""

from pdserve.contract.records import Adapter, Instance, Role, SlotState

INSTANCES = "instances/"
CARDS = "models/"
SETTINGS = "settings/"
NEWCOMERS = "newcomers/"
"""Workers that do not serve yet: workers of the other role warm up with them."""
SLOTS = "slots/"
LEADERS, FOLLOWERS = "leaders/", "followers/"
"""Hosts of a worker that spans hosts, by the worker's name and group (`process/nodes.py`: `meeting_place`)."""
ADAPTERS = "adapters/"
"""LoRA adapters loaded or unloaded at run time, for all workers, also those that start later; without a lease."""
LOADING = "loading/"
"""Adapters that workers should load now, under the lease of the frontend that asks."""
CLAIMS = "claims/"
"""Locks on adapter names, under the frontend's lease, because a name is unique among all models."""
FILE = "file"
"""If `serve` runs its own etcd: path of the YAML file for which the live settings were set."""


def instances(role: Role) -> list[str]:
    """Return the key prefixes of all processes with this role's work."""
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
