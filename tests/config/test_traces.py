"""OpenTelemetry's variables override the collector's URL in the file."""

from pathlib import Path

import pytest

from tests.config.test_load import GOOD, problems, read

FILE = "Graph: {otlp-endpoint: 'http://file:4318'}\n"
BASE, EXACT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
DISABLED, PROTOCOL = "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("text", "env", "url"),
    [
        ("", {}, None),
        ("Graph: {otlp-endpoint: 'https://file/otlp/v1/traces'}\n", {}, "https://file/otlp/v1/traces"),
        ("", {BASE: "HTTP://env:4318/"}, "http://env:4318/v1/traces"),
        (FILE, {BASE: "http://env:4318", PROTOCOL: "http/protobuf"}, "http://env:4318/v1/traces"),
        (FILE, {BASE: "http://env:4318", EXACT: "http://env:1/here"}, "http://env:1/here"),
        (FILE, {DISABLED: "true"}, None),
        (FILE, {DISABLED: "false", BASE: ""}, "http://file:4318/v1/traces"),
        ("", {BASE: "http://env:4317", PROTOCOL: "grpc"}, None),
    ],
)
def test_the_environment_overrides_the_collector_of_the_file(
    tmp_path: Path, text: str, env: dict[str, str], url: str | None
) -> None:
    config = read(tmp_path, GOOD + text, env)
    assert config.otlp_endpoint == url
    told = [note for note in config.notes if "gets no traces" in note]
    assert bool(told) == (env.get(PROTOCOL) == "grpc")


@pytest.mark.parametrize("url", ["localhost:4318", "http://", "http://h:x", "http://h?a=b"])
def test_urls_that_cannot_be_a_collector_are_refused(tmp_path: Path, url: str) -> None:
    (in_file,) = problems(tmp_path, f"{GOOD}Graph: {{otlp-endpoint: '{url}'}}\n")
    assert in_file.startswith(f"FILE:11: Graph.otlp-endpoint is '{url}', but must be a collector's URL")
    (in_environment,) = problems(tmp_path, GOOD, {EXACT: url})
    assert in_environment.startswith(
        f"Environment variable {EXACT} is '{url}', but must be a collector's URL"
    )
