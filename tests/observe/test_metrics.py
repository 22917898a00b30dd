from prometheus_client.parser import text_string_to_metric_families

from pdserve.observe.metrics import MergedPage

ONE = """# HELP pdserve_requests_total HTTP requests answered
# TYPE pdserve_requests_total counter
pdserve_requests_total{code="200",model="a"} 3.0
# HELP lat Latency
# TYPE lat histogram
lat_bucket{le="1.0"} 1.0
lat_bucket{le="+Inf"} 2.0
lat_sum 1.5
lat_count 2.0
"""
OTHER = """# HELP pdserve_requests_total HTTP requests answered
# TYPE pdserve_requests_total counter
pdserve_requests_total{code="200",model="a"} 4.0
# HELP vllm:up Is it
# TYPE vllm:up gauge
vllm:up{instance="decode-0",text="with \\"quotes\\""} 1.0
"""


def samples(page: bytes) -> dict[tuple[str, str], float]:
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[sample.name, labels] = sample.value
    return found


def merge(pages: dict[str, str]) -> bytes:
    page = MergedPage()
    for instance, text in pages.items():
        page.add(instance, text)
    return page.text()


def test_families_of_metrics_of_several_pages_are_merged() -> None:
    page = merge({"f-0": ONE, "f-1": OTHER})
    assert page.count(b"# TYPE pdserve_requests_total counter") == 1
    assert samples(page) == {
        ("pdserve_requests_total", "code=200,instance=f-0,model=a"): 3.0,
        ("pdserve_requests_total", "code=200,instance=f-1,model=a"): 4.0,
        ("lat_bucket", "instance=f-0,le=1.0"): 1.0,
        ("lat_bucket", "instance=f-0,le=+Inf"): 2.0,
        ("lat_sum", "instance=f-0"): 1.5,
        ("lat_count", "instance=f-0"): 2.0,
        ("vllm:up", 'instance=decode-0,source=f-1,text=with "quotes"'): 1.0,
    }


def test_a_broken_page_is_left_out() -> None:
    assert merge({"a": ONE, "b": "<html>{ no metrics"}) == merge({"a": ONE})
    cut = "# HELP lat Latency\n# TYPE lat histogram\nlat_bucket{le="
    assert merge({"a": ONE, "b": cut}) == merge({"a": ONE})


def test_families_with_different_types_are_not_merged() -> None:
    clash = "# TYPE lat gauge\nlat 5.0\n"
    assert b'instance="b"' not in merge({"a": ONE, "b": clash})
