"""The key scheme of the registry, relative to the namespace. Instance ids hold no slash; model names may."""

from pdserve.messages import Instance, SlotState

INSTANCES = "instances/"
CARDS = "models/"
SETTINGS = "settings/"
NEWCOMERS = "newcomers/"
"""workers before they can serve: nobody but the workers that warm up with them looks here"""
SLOTS = "slots/"


def instance(one: Instance) -> str:
    return f"{INSTANCES}{one.role.value}/{one.id}"


def newcomer(one: Instance) -> str:
    return f"{NEWCOMERS}{one.role.value}/{one.id}"


def card(model: str, instance_id: str) -> str:
    return f"{CARDS}{model}/{instance_id}"


def setting(name: str) -> str:
    return f"{SETTINGS}{name}"


def slot(state: SlotState) -> str:
    return f"{SLOTS}{state.host}/{state.name}"


def split_card(key: str) -> tuple[str, str]:
    """Model name and instance id of a card's key."""
    model, _, instance_id = key.removeprefix(CARDS).rpartition("/")
    return model, instance_id
