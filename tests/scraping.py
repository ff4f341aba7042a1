"""Reads /metrics as Prometheus does."""

from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families


def scrape(address: str) -> dict[tuple[str, ...], float]:
    """The values by name and values of the labels, in alphabetical order of the labels."""
    with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
