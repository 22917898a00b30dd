import pytest

from pdserve.frontend.edge.answer import with_one_shape


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        (
            b'{"error":{"type":"Gateway Timeout","code":504}}',
            504,
            b'{"error":{"type":"TimeoutError","code":504}}',
        ),
        (
            b'data: {"error":{"type":"Bad Request","code":400}}\n\n',
            0,
            b'data: {"error":{"type":"Bad Request","code":400}}\n\n',
        ),
        (
            b'data: {"error":{"type":"Service Unavailable","code":503}}\n\n',
            0,
            b'data: {"error":{"type":"ServiceUnavailableError","code":503}}\n\n',
        ),
        (b'{"error":{"type":"Strange","code":418}}', 418, b'{"error":{"type":"Strange","code":418}}'),
        (b'{"error":"text"}', 400, b'{"error":"text"}'),
        (b'data: {"error" is no JSON', 0, b'data: {"error" is no JSON'),
        (b"[1]", 500, b"[1]"),
    ],
)
def test_an_error_has_the_type_of_its_status(body: bytes, status: int, expected: bytes) -> None:
    assert with_one_shape("/v1/completions", body, status) == expected


def test_an_error_in_anthropics_shape_stays_as_it_is() -> None:
    body = b'{"type": "error", "error": {"type": "BadRequestError", "message": "\\u00e9"}}'
    assert with_one_shape("/v1/messages", body, 400) is body
