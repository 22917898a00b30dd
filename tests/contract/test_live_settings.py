"""Which live settings are in effect, and how they are explained (`pdserve/contract/live_settings.py`)."""

import pytest

from pdserve.contract.live_settings import SETTINGS, explain_settings, list_changes, merge_files, value_error

PROMISED = {"slo-ttft": "500ms", "slo-gap": "60ms"}
ADAPTIVE = {"policy": "adaptive", "max-local-prefill-length": "512", "max-prefill-queue-size": "10"}
THRESHOLD = {**ADAPTIVE, "policy": "threshold", "router": "kv"}
LENGTH = "max-local-prefill-length"


def test_invalid_values_are_refused() -> None:
    for text in ["\uff15", "٣", "5\n", "\n5", " 5", "+5", "5_0", "5.0", "-1", "", "2147483648", "²"]:
        assert value_error(LENGTH, text) == "a whole number from 0 to 2147483647"
    assert value_error("router", "5") == "one of round-robin, least-loaded, kv"
    assert not value_error(LENGTH, "2147483647")


@pytest.mark.parametrize(
    ("file", "live", "lines"),
    [
        (THRESHOLD, {"router": "kv"}, []),
        (THRESHOLD, {"router": "round-robin"}, ["router = round-robin (file: kv)"]),
        (
            ADAPTIVE,
            {LENGTH: "0"},
            [f"policy = threshold (file: adaptive), since {LENGTH} is set", f"{LENGTH} = 0 (file: 512)"],
        ),
        (
            THRESHOLD,
            {LENGTH: "0", "policy": "adaptive"},
            [
                "policy = adaptive (file: threshold)",
                f"{LENGTH} = 0 (file: 512), without effect under policy adaptive",
            ],
        ),
        (ADAPTIVE, {"router": "kv"}, ["router = kv, without effect: no running process uses it"]),
        (
            ADAPTIVE,
            {LENGTH: "\uff15"},
            [
                f"{LENGTH} = 512; '\uff15', which was set, is ignored: it takes a whole number from 0 to 2147483647"
            ],
        ),
        (PROMISED, {"slo-gap": "off"}, ["slo-gap = off (file: 60ms)"]),
        (
            merge_files([ADAPTIVE, THRESHOLD]),
            {"policy": "adaptive"},
            ["policy = adaptive (file: adaptive or threshold)"],
        ),
    ],
)
def test_changes_from_the_file_are_listed(
    file: dict[str, str], live: dict[str, str], lines: list[str]
) -> None:
    assert list_changes(file, live) == lines


def test_each_setting_is_explained() -> None:
    assert explain_settings({**THRESHOLD, "slo-gap": "off"}, {"router": "kv"}) == {
        "policy": "threshold (as in the file)",
        LENGTH: "512 (as in the file)",
        "max-prefill-queue-size": "10 (as in the file)",
        "router": "kv (set, as in the file)",
        "slo-ttft": "(as in the file)",
        "slo-gap": "off (as in the file)",
    }
    assert explain_settings({}, {}) == dict.fromkeys(SETTINGS, "(as in the file)")
