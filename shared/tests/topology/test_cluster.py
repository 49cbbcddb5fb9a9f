import dataclasses
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import TopologyError
from shared.topology import Cluster, Device, Host, Link
from shared.topology.device import CPU, H100, PRESETS, T4
from shared.units import Gbps

MINE = Device(
    name="mine",
    kind="cuda",
    flops_per_s=1e12,
    flops_fp32_per_s=5e11,
    memory_bytes=10**10,
    memory_bytes_per_s=1e11,
)
links = st.builds(Link, alpha_s=st.floats(0, 1), beta_s_per_byte=st.floats(0, 1))
devices = st.lists(st.sampled_from([*PRESETS.values(), MINE]), min_size=1, max_size=4).map(tuple)


@st.composite
def clusters(draw):
    hosts = tuple(
        Host(name=f"h{index}", devices=draw(devices), link=draw(links))
        for index in range(draw(st.integers(1, 4)))
    )
    pairs = [(a.name, b.name) for a in hosts for b in hosts if a.name < b.name]
    own = draw(st.dictionaries(st.sampled_from(pairs), links)) if pairs else {}
    return Cluster(hosts=hosts, network=draw(links), links=own)


@given(clusters())
def test_yaml_round_trip(cluster):
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster


@given(clusters())
def test_ranks_number_devices_host_by_host(cluster):
    expected = [(host.name, device) for host in cluster.hosts for device in host.devices]
    found = [(cluster.host(r).name, cluster.device(r)) for r in range(cluster.num_ranks)]
    assert found == expected


def test_links():
    near, far, own = (Link.from_rate(rate * Gbps) for rate in (100, 10, 1))
    hosts = tuple(Host(name=name, devices=(T4, T4), link=near) for name in "abc")
    cluster = Cluster(hosts=hosts, network=far, links={("a", "c"): own})
    assert cluster.link(0, 1) is near
    assert cluster.link(1, 2) is far
    assert cluster.link(1, 4) is cluster.link(5, 0) is own
    assert cluster.link(3, 3).time_s(10**9) == 0


def test_ten_thousand_gpus():
    cluster = Cluster.uniform(1250, 8, H100)
    assert cluster.num_ranks == 10_000
    assert cluster.host(9_999).name == "host1249"
    assert cluster.link(0, 9_999) == cluster.network


def test_written_by_hand(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("""
hosts:
  - {name: a, devices: [H100 x 3, T4], link: {rate: 100gbit, alpha_s: 1.0e-6}}
  - {name: b, devices: [CPU]}
network: {rate: 1gbit}
links:
  - {hosts: [a, b], rate: 100mbit}
""")
    cluster = Cluster.from_yaml(path)
    assert [cluster.device(rank).name for rank in range(5)] == ["H100"] * 3 + ["T4", "CPU"]
    assert cluster.link(0, 3).bytes_per_s == pytest.approx(12.5e9)
    assert cluster.link(0, 4).bytes_per_s == pytest.approx(12.5e6)
    assert Cluster.from_yaml(cluster.to_yaml(tmp_path / "again.yaml")) == cluster
    assert Cluster.from_yaml(tmp_path / "again.yaml") == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: [", "must be YAML"),
        ("- 1", "cluster: expected a mapping"),
        ("{}", "cluster: expected the keys ['hosts']"),
        ("{hosts: [], speed: 1}", "['hosts', 'speed']"),
        ("hosts: 3", "hosts: expected a list, got 3"),
        ("hosts: []", "needs hosts with names of their own"),
        ("hosts: [{name: a}]", "hosts[0]: expected the keys ['devices', 'name']"),
        ("hosts: [{name: a, devices: []}]", "host 'a' has no devices"),
        ("hosts: [{name: a, devices: [H100, H1000]}]", "hosts[0].devices[1]: expected one of H200"),
        ("hosts: [{name: a, devices: [H100 x two]}]", "and a count"),
        ("hosts: [{name: a, devices: [{name: x}]}]", "hosts[0].devices[0]: expected the keys"),
        ("hosts: [{name: a, devices: [T4], link: {rate: fast}}]", "hosts[0].link: "),
        (
            "{hosts: [{name: a, devices: [T4]}], network: {alpha_s: 1}}",
            "network: expected the keys",
        ),
        (
            "{hosts: [{name: a, devices: [T4]}], network: {beta_s_per_byte: -1}}",
            "network: a link's alpha_s and beta_s_per_byte",
        ),
        (
            "{hosts: [{name: a, devices: [T4]}], links: [{rate: 1gbit}]}",
            "links[0].hosts: expected two",
        ),
        (
            "{hosts: [{name: a, devices: [T4]}], links: [{hosts: [a, b], rate: 1gbit}]}",
            "two different hosts of ['a']",
        ),
        ("hosts: [{name: a, devices: [T4]}, {name: a, devices: [T4]}]", "got ['a', 'a']"),
    ],
)
def test_errors_give_the_path(text, message):
    with pytest.raises(TopologyError) as caught:
        Cluster.from_yaml(text)
    assert message in str(caught.value)


def test_device_with_a_bad_number():
    text = Cluster(hosts=(Host(name="a", devices=(MINE,)),)).to_yaml()
    with pytest.raises(
        TopologyError, match=r"hosts\[0\]\.devices\[0\]: .*memory_bytes must be pos"
    ):
        Cluster.from_yaml(text.replace("memory_bytes: 10000000000", "memory_bytes: 0"))


def test_a_device_written_without_narrow_peaks_has_none():
    text = Cluster(hosts=(Host(name="a", devices=(MINE,)),)).to_yaml()
    old = "\n".join(line for line in text.splitlines() if "int8" not in line and "fp8" not in line)
    assert Cluster.from_yaml(old).device(0) == dataclasses.replace(
        MINE, int8_ops_per_s=None, fp8_flops_per_s=None
    )
    peaks = dataclasses.replace(MINE, int8_ops_per_s=2e12, fp8_flops_per_s=1e12)
    cluster = Cluster(hosts=(Host(name="a", devices=(peaks,)),))
    assert Cluster.from_yaml(cluster.to_yaml()).device(0) == peaks


def test_ranks_outside():
    with pytest.raises(TopologyError, match=r"ranks 0\.\.1, not 2"):
        Cluster.uniform(2, 1, CPU).device(2)


def test_detect_this_machine(monkeypatch):
    for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cluster = Cluster.detect()
    assert cluster.num_ranks == 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cluster.device(0) == dataclasses.replace(CPU, memory_bytes=memory_bytes)


def test_detect_gpus(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    names = [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100-SXM4-40GB",
        "Tesla P100-PCIE-12GB",
        "NVIDIA A800-SXM4-80GB",
        "Tesla V100-SXM2-32GB",
        "Tesla T4",
        "NVIDIA L4",
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    found = [device.name for device in Cluster.detect().hosts[0].devices]
    assert found == [
        *("H100", "H200", "A100_80", "A100_40", "P100_12", "A800", "V100_32", "T4", "L4")
    ]
    names[1] = "NVIDIA A10"
    with pytest.raises(TopologyError, match=r"device 1 is 'NVIDIA A10'.*no preset"):
        Cluster.detect()


def test_detect_under_torchrun(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cluster = Cluster.detect()
    assert [len(host.devices) for host in cluster.hosts] == [2, 2, 2]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(TopologyError, match="WORLD_SIZE=6 is no multiple of LOCAL_WORLD_SIZE=4"):
        Cluster.detect()


def test_a_device_is_described_by_what_differs_from_a_preset():
    cluster = Cluster.from_yaml(
        "hosts: [{name: a, devices: [{like: T4, name: 'old T4', memory_bytes: 12e9}, T4]}]"
    )
    assert cluster.device(0) == dataclasses.replace(T4, name="old T4", memory_bytes=12 * 10**9)
    assert cluster.device(1) == T4


def test_a_device_like_no_preset_is_refused_by_its_path():
    with pytest.raises(TopologyError, match=r"hosts\[0\].devices\[0\].like: expected one of .*T5"):
        Cluster.from_yaml("hosts: [{name: a, devices: [{like: T5}]}]")
    with pytest.raises(TopologyError, match="colour"):
        Cluster.from_yaml("hosts: [{name: a, devices: [{like: T4, colour: red}]}]")
