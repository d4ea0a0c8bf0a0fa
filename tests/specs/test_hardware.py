"""Hardware profiles: what ships is sane and sourced, what is wrong is told with its place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rlhfsim import resources
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.hardware.clusters import cluster_from
from rlhfsim.specs.hardware.hardware import Price, Profile
from rlhfsim.specs.hardware.prices import price_of, prices
from rlhfsim.specs.hardware.profile_files import find_profile, profile_files
from rlhfsim.specs.hardware.profiles import (
    aliases,
    common_coefficients,
    load_profile,
    node_group,
    parse_cluster,
    profile_from_text,
    profile_hash,
    profile_names,
    profile_yaml,
)
from rlhfsim.specs.loading import parse_yaml
from rlhfsim.units import GIB, TERA

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = [
    "v100_sxm",
    "a100_sxm_40gb",
    "a100_sxm",
    "a800_sxm",
    "h100_sxm",
    "h100_pcie",
    "h800_sxm",
    "h200_sxm",
    "h20_sxm",
    "b200_sxm",
    "b300_sxm",
    "gb200_nvl72",
    "gb300_nvl72",
    "l4",
    "l40s",
    "a10g",
    "rtx_4090",
    "a6000",
    "a40",
    "l20",
    "mi250x",
    "mi300x",
    "mi325x",
    "mi355x",
    "cpu",
]
H100 = (resources.shipped("hardware_profiles") / "h100_sxm.yaml").read_text().partition("\ncurves:")[0] + "\n"
every_profile = pytest.mark.parametrize("name", EXPECTED)


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    return {name: load_profile(name) for name in EXPECTED}


def test_all_expected_profiles_ship():
    assert set(EXPECTED) <= set(profile_names())


@every_profile
def test_a_profile_survives_the_round_trip_through_yaml(name, profiles):
    profile = profiles[name]
    again = profile_from_text(profile_yaml(profile))
    assert again == profile
    assert profile_hash(again) == profile_hash(profile)


def _sourced(value: object) -> list[tuple[str, object]]:
    """Every dataclass below `value` that holds numbers of its own, with its type name."""
    if is_dataclass(value):
        below = [item for f in fields(value) for item in _sourced(getattr(value, f.name))]
        return [(type(value).__name__, value), *below] if hasattr(value, "value") else below
    if isinstance(value, dict):
        return [item for child in value.values() for item in _sourced(child)]
    return []


@every_profile
def test_every_number_has_a_source(name, profiles):
    found = _sourced(replace(profiles[name], curves=None))
    assert len(found) > 50
    for kind, number in found:
        assert len(number.source.strip()) > 10, (name, kind)


@every_profile
def test_intervals_hold_their_values(name, profiles):
    for key, c in profiles[name].coefficients.items():
        assert c.low <= c.value <= c.high, (name, key)


UNMEASURED = [
    "nic_efficiency",
    "pcie_efficiency",
    "local_storage_read_efficiency",
    "local_storage_write",
    "shared_storage_efficiency",
]


@every_profile
def test_what_nobody_measured_has_an_interval_of_thirty_per_cent(name, profiles):
    for key in UNMEASURED:
        c = profiles[name].coefficient(key)
        assert c.low <= 0.701 * c.value, (name, key)
        assert c.high >= 1.295 * c.value, (name, key)


@every_profile
def test_a_profile_has_every_common_coefficient(name, profiles):
    assert set(profiles[name].coefficients) == set(common_coefficients())


@every_profile
def test_flop_per_byte_of_device_memory_is_plausible(name, profiles):
    p = profiles[name]
    dense = p.peak.get("bf16") or p.peak["fp16"]
    assert 30 <= dense.value / p.hbm.value <= 1000


@every_profile
def test_usable_memory_is_most_of_the_memory(name, profiles):
    p = profiles[name]
    assert 0.9 <= p.usable_memory.value / p.memory.value <= 1


@every_profile
def test_fabrics_are_ordered_by_speed(name, profiles):
    p = profiles[name]
    assert p.hbm.value > p.scale_up.bandwidth.value >= 0
    assert p.scale_up.bandwidth.value >= p.nic.value
    assert p.node.host_bandwidth.value >= p.pcie.value


@every_profile
def test_narrower_formats_are_never_slower(name, profiles):
    rates = [profiles[name].peak.get(p) for p in ("fp32", "tf32", "bf16", "fp8", "fp4")]
    values = [r.value for r in rates if r]
    assert values == sorted(values)


def test_eighty_gb_cards_hold_eighty_gib(profiles):
    for name in ("a100_sxm", "a800_sxm", "h100_sxm", "h800_sxm", "h100_pcie"):
        assert profiles[name].memory.value == 80 * GIB
        assert 79.1 * GIB <= profiles[name].usable_memory.value <= 79.33 * GIB


def test_h20_has_the_bandwidth_of_hopper_and_a_seventh_of_its_compute(profiles):
    h20, h100 = profiles["h20_sxm"], profiles["h100_sxm"]
    assert h20.hbm.value > h100.hbm.value
    assert h100.peak["bf16"].value / h20.peak["bf16"].value == pytest.approx(989 / 148)
    assert h20.peak["fp8"].value == 296 * TERA


def test_fp8_is_absent_where_the_hardware_lacks_it(profiles):
    without = {name for name, p in profiles.items() if "fp8" not in p.peak}
    ampere = {"a100_sxm", "a100_sxm_40gb", "a800_sxm", "a10g", "a40", "a6000"}
    assert without == {"v100_sxm", "mi250x", "cpu"} | ampere


def test_v100_has_fp16_only(profiles):
    assert set(profiles["v100_sxm"].peak) == {"fp16", "fp32"}


def test_consumer_rates_are_those_with_fp32_accumulation(profiles):
    assert profiles["rtx_4090"].peak["bf16"].value == pytest.approx(165.2 * TERA)
    assert profiles["l40s"].peak["bf16"].value == 362 * TERA


def test_export_cards_differ_from_their_base_in_nvlink_only(profiles):
    for own, base in (("a800_sxm", "a100_sxm"), ("h800_sxm", "h100_sxm")):
        a, b = profiles[own], profiles[base]
        assert a.scale_up.bandwidth.value == 200e9 < b.scale_up.bandwidth.value
        assert (a.peak, a.hbm, a.memory, a.node) == (b.peak, b.hbm, b.memory, b.node)
        assert a.price != b.price


def test_a_rack_is_one_nvlink_domain(profiles):
    for name in ("gb200_nvl72", "gb300_nvl72"):
        assert profiles[name].scale_up.domain == 72
        assert profiles[name].node.gpus == 4


def test_only_dated_prices_are_given(profiles):
    priced = {name: p.price for name, p in profiles.items() if p.price}
    assert set(profiles) - set(priced) == {"cpu", "l20", "mi250x"}  # nobody rents them out
    assert all(re.match(r"202\d(-\d\d)?$", price.date) for price in priced.values())
    assert all(p.source and p.low < p.high for markets in prices().values() for p in markets.values())
    assert set(prices()) == set(priced)
    assert {"on-demand", "reserved", "spot"} == set(prices()["h100_sxm"])


@pytest.mark.parametrize("date", ["x", "1e30", "yesterday", "20266"])
def test_the_date_of_a_price_is_one(date):
    with pytest.raises(ValidationError, match="date"):
        TypeAdapter(Price).validate_python({"value": 2, "low": 1, "high": 3, "date": date, "source": "me"})


def test_a_users_file_of_prices_replaces_single_entries(tmp_path, monkeypatch):
    own = tmp_path / "mine.yaml"
    own.write_text("h100_sxm: {on-demand: 2.20 USD/h}\n")
    monkeypatch.setenv("RLHFSIM_PRICES", str(own))
    assert (load_profile("h100").price.value, load_profile("h100").price.date) == (2.2, "given")
    assert price_of("h100_sxm", "spot").value == 1.5
    assert load_profile("h200").price.value == 4
    own.write_text("h100_sxm: {on-demand: {value: 3 USD/h}}\n")
    with pytest.raises(RlhfsimError, match="mine"):
        prices()
    monkeypatch.setenv("RLHFSIM_PRICES", str(tmp_path / "none.yaml"))
    with pytest.raises(RlhfsimError):
        prices()


def test_the_mean_time_between_failures_is_that_of_the_llama_3_paper():
    days = common_coefficients()["mtbf_per_gpu"].value / 86400
    assert days == pytest.approx(16384 * 54 / 419, rel=0.01)


def test_latencies_read_their_units():
    common = common_coefficients()
    assert common["nvlink_latency"].value == pytest.approx(1.5e-6)
    assert common["nvlink_latency"].dimension == "s"
    assert common["nccl_bytes"].value == 392 * 2**20
    assert common["pue"].dimension == "1"


def test_every_common_coefficient_is_documented():
    text = (ROOT / "docs" / "hardware.md").read_text()
    assert [name for name in common_coefficients() if f"`{name}`" not in text] == []


# ------------------------------------------------------------------------------------- finding


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h100", "h100_sxm"),
        ("H100-SXM", "h100_sxm"),
        ("a100-80", "a100_sxm"),
        ("A100_80", "a100_sxm"),
        ("a100", "a100_sxm"),
        ("a100-40", "a100_sxm_40gb"),
        ("rtx-4090", "rtx_4090"),
        ("4090", "rtx_4090"),
        ("gb200", "gb200_nvl72"),
        ("b200", "b200_sxm"),
        ("mi300x", "mi300x"),
        ("V100", "v100_sxm"),
        ("h20", "h20_sxm"),
    ],
)
def test_aliases_find_profiles(alias, name):
    assert load_profile(alias).name == name


def test_no_alias_is_used_twice_or_hides_a_name():
    names = {name.replace("_", "-") for name in profile_names()}
    listed = [
        alias for path in profile_files().values() for alias in yaml.safe_load(path.read_text())["aliases"]
    ]
    assert len(set(listed)) == len(listed)
    assert not names & set(listed)
    assert set(aliases()) == set(listed)


def test_each_file_is_named_after_its_profile(profiles):
    assert all(name == p.name for name, p in profiles.items())


def test_an_unknown_name_gets_the_nearest_ones():
    with pytest.raises(RlhfsimError) as caught:
        load_profile("h10O")
    assert caught.value.code == "unknown-hardware-profile"
    assert "h100" in (caught.value.help or "")


def test_the_users_folder_comes_before_the_shipped_one(tmp_path, monkeypatch):
    own = tmp_path / "hardware_profiles"
    own.mkdir()
    (own / "h100_sxm.yaml").write_text(H100.replace("title: H100 SXM 80GB", "title: ours"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.yaml").write_text("name: mine\ntitle: mine\naliases: [my-gpu]\nextends: h200\n")
    (other / "tuned.yaml").write_text("name: h200_night\ntitle: tuned\nextends: h200\n")
    (tmp_path / "beside.yaml").write_text("name: h200_day\ntitle: beside\nextends: h200\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHFSIM_PROFILES", str(other))
    assert load_profile("h100").title == "ours"
    assert load_profile("my_gpu").hbm == load_profile("h200_sxm").hbm
    names = ("tuned", "h200_night", "H200-Night", "beside", "h200_day")  # by file and by name alike
    assert [load_profile(name).title for name in names] == ["tuned"] * 3 + ["beside"] * 2
    assert find_profile("a100").parent == resources.shipped("hardware_profiles")


def test_a_users_common_file_replaces_single_coefficients(tmp_path, monkeypatch):
    (tmp_path / "hardware_profiles").mkdir()
    (tmp_path / "hardware_profiles" / "common.yaml").write_text(
        "coefficients:\n  pue: {value: 1.2, low: 1.1, high: 1.3, source: our own data centre}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_profile("h100")["pue"] == 1.2
    assert load_profile("h100")["fragmentation"] > 1


def test_profiles_that_extend_each_other_are_refused(tmp_path, monkeypatch):
    (tmp_path / "one.yaml").write_text("name: one\ntitle: one\nextends: two\n")
    (tmp_path / "two.yaml").write_text("name: two\ntitle: two\nextends: one\n")
    monkeypatch.setenv("RLHFSIM_PROFILES", str(tmp_path))
    with pytest.raises(RlhfsimError, match="extends itself"):
        load_profile("one")


def test_equal_content_has_an_equal_hash_whatever_the_layout():
    assert profile_hash(profile_from_text(H100)) == profile_hash(
        profile_from_text("# note\n" + H100.replace("3350 GB/s", "3.35 TB/s"))
    )
    assert profile_hash(profile_from_text(H100)) != profile_hash(
        profile_from_text(H100.replace("3350 GB/s", "3.36 TB/s"))
    )


# ---------------------------------------------------------------------------------- wrong input


def _broken(old: str, new: str) -> RlhfsimError:
    assert old in H100
    with pytest.raises(RlhfsimError) as caught:
        profile_from_text(H100.replace(old, new, 1), "mine.yaml")
    error = caught.value
    assert error.place is not None
    assert error.place.file == "mine.yaml"
    return error


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ("3350 GB/s", "3350 GX/s", "unknown-unit", "hbm"),
        ("3350 GB/s", "-3350 GB/s", "bad-value", "hbm"),
        ("3350 GB/s", ".nan", "bad-quantity", "hbm"),
        ("3350 GB/s", ".inf", "bad-quantity", "hbm"),
        ("3350 GB/s", "0", "bad-value", "hbm"),
        ("3350 GB/s", "700 W", "unknown-unit", "hbm"),
        ("3350 GB/s", "1e999 GB/s", "bad-quantity", "hbm"),
        ("3350 GB/s", "[1]", "bad-quantity", "hbm"),
        ("vendor: nvidia", "vendor: intel", "bad-value", "vendor"),
        ("tdp:", "tpd:", "unknown-key", "tpd"),
        ("hbm: {", "hbm: {bandwith: 3, ", "unknown-key", "hbm"),
        ("  domain: 8", "  domain: 0", "bad-value", "domain"),
        ("  domain: 8", "  domain: 2.5", "bad-value", "domain"),
        ("79.18 GiB", "99 GiB", "bad-value", "name"),
        ("low: 0.68", "low: 0.99", "interval-without-value", "nvlink_efficiency"),
        ("low: 0.68", "low: 0", "coefficient-out-of-range", "name"),
        ("low: 0.68", "low: 3 ms", "wrong-unit", "nvlink_efficiency"),
        ("value: 0.745, low: 0.68", "value: 2 ms, low: 1 GB/s", "mixed-units", "nvlink_efficiency"),
        ("  nvlink_efficiency", "  nvlink_eficiency", "unknown-coefficient", "nvlink_eficiency"),
        ("name: h100_sxm", "name: h100_sxm\nname: twice", "malformed-yaml", "name: twice"),
        ("  fp8:", "  fp9:", "bad-value", "fp9"),
        ("title: H100 SXM 80GB", "title: [", "malformed-yaml", None),
    ],
)
def test_what_is_wrong_is_told_with_file_and_line(old, new, code, line):
    error = _broken(old, new)
    assert error.code == code, str(error)
    assert error.place.line is not None
    if line and error.place.text is not None:
        assert line in error.place.text


def test_an_empty_source_is_refused():
    whole = re.search(r'source: "stas00/ml-engineering@compute[^"]*"', H100)
    error = _broken(whole[0], 'source: ""')
    assert (error.code, "source" in error.message) == ("bad-value", True), error
    assert error.place.line


def test_a_missing_key_is_named():
    with pytest.raises(RlhfsimError, match="'tdp' is missing"):
        profile_from_text(H100.replace("\ntdp:", "\n# tdp:"))


def test_aliases_of_yaml_are_refused_but_stars_in_words_are_not():
    assert "*" in H100  # 80 * 2**30 in a source
    with pytest.raises(RlhfsimError, match="aliases"):
        profile_from_text(H100.replace("title: H100 SXM 80GB", "title: *other"))


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "- a"])
def test_what_is_no_mapping_is_refused(text):
    with pytest.raises(RlhfsimError, match="must hold one mapping"):
        profile_from_text(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\x00", "not valid YAML"),
        ("a: [", "not valid YAML"),
        ("'", "not valid YAML"),
        ("{" * 5000, "nested more than"),
        ("- " * 5000, "nested more than"),
    ],
)
def test_what_is_no_yaml_is_refused(text, said):
    with pytest.raises(RlhfsimError, match=said):
        profile_from_text(text)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.just(10**400),
    st.just({1: 2}),
    st.sampled_from(["1e400", "-1 GB/s", "1 GB", "nan", "=", "2001-12-14", "1:30"]),
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def _reads_or_explains(text: str) -> None:
    try:
        profile = profile_from_text(text)
    except RlhfsimError:
        return
    assert profile_from_text(profile_yaml(profile)) == profile


@quick
@given(st.data())
def test_damaged_text_never_raises_anything_else(data):
    start = data.draw(st.integers(0, len(H100)))
    end = data.draw(st.integers(start, min(len(H100), start + 40)))
    _reads_or_explains(H100[:start] + data.draw(st.text(max_size=6)) + H100[end:])


@quick
@given(st.data())
def test_damaged_values_never_raise_anything_else(data):
    document = yaml.safe_load(H100)
    at = document
    while True:
        key = data.draw(st.sampled_from(sorted(at, key=str)))
        if not isinstance(at[key], dict) or not at[key] or data.draw(st.integers(0, 3)) == 0:
            break
        at = at[key]
    if data.draw(st.booleans()):
        at[key] = data.draw(LEAVES)
    else:
        at[data.draw(st.one_of(st.text(max_size=5), st.integers(), st.none()))] = at.pop(key)
    _reads_or_explains(yaml.safe_dump(document, allow_unicode=True))


# --------------------------------------------------------------------------------- large curves


PEAKS = {"bf16": 1e15, "hbm": 1e12, "link": 1e11}


def gemm(points: int = 2, **other: object) -> dict:
    """A section with one table of `points` knots an axis, all at one loss."""
    axes = {name: " ".join(str(2**i) for i in range(points)) for name in "mnk"}
    table = {"source": "made up", "interval": [0.9, 1.1], "axes": axes, "loss": "a0" * points**3}
    return {"peaks": PEAKS, "tables": {"gemm/bf16": {**table, **other}}}


def test_a_profile_with_sixty_kilobytes_of_curves_loads(tmp_path):
    path = tmp_path / "big.yaml"
    path.write_text(H100 + "curves: " + json.dumps(gemm(32)) + "\n")
    assert path.stat().st_size > 60_000
    assert load_profile(path).curves == gemm(32)


def test_curves_read_the_same_as_json_and_as_yaml():
    as_json = profile_from_text(H100 + f"curves: {json.dumps(gemm())}\n")
    as_yaml = profile_from_text(H100 + yaml.safe_dump({"curves": gemm()}, sort_keys=False))
    assert as_json == as_yaml


def test_an_error_beside_json_curves_keeps_its_line():
    with pytest.raises(RlhfsimError) as caught:
        profile_from_text(H100.replace("3350 GB/s", "x") + 'curves: {"tables": {}}\n')
    assert caught.value.place.text.startswith("hbm:")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (gemm(loss="a0"), "loss has 2 digits, its axes have 8 nodes"),
        (gemm(loss="A0" * 8), "'curves.tables.gemm/bf16.loss'"),
        (gemm(interval=[1.1, 0.9]), "not in order"),
        (gemm(interval=[0.0, 0.9]), "interval.0"),
        (gemm(axes={"m": "1 2", "n": "1 2"}, loss="a0" * 4), "has the axes m, n"),
        (gemm(axes={"m": "2 1", "n": "1 2", "k": "1 2"}), "axis 'm'"),
        (gemm(axes={"m": "0 nan", "n": "1 2", "k": "1 2"}), "axis 'm'"),
        ({**gemm(), "peaks": {"hbm": 1e12}}, "peaks holds none"),
        ({**gemm(), "peaks": {"bf16": True}}, "peaks.bf16"),
        ({**gemm(), "peaks": {"bf16": 0}}, "peaks.bf16"),
        ({"peaks": PEAKS, "tables": {"fft/bf16": gemm()["tables"]["gemm/bf16"]}}, "unknown kernel table"),
        ({"borrow": {"from": "h100_sxm", "compute": -1}}, "borrow.compute"),
        ({"borrow": {"widen": 2}}, "'curves.borrow.from' is missing"),
        ({"gemm": [1, 2.5]}, "unknown key 'curves.gemm'"),
    ],
)
def test_a_table_of_kernels_is_checked_where_it_stands(section, message):
    with pytest.raises(RlhfsimError) as caught:
        profile_from_text(H100 + f"curves: {json.dumps(section)}\n", "mine.yaml")
    assert message in str(caught.value)
    assert "--> mine.yaml" in str(caught.value)


# ------------------------------------------------------------------------------------- clusters


def test_a_cluster_has_the_nodes_of_its_profile():
    cluster = parse_cluster(20, "h100")
    assert (cluster.gpus, cluster.node_group.nodes, cluster.node_group.gpus_per_node) == (20, 3, 8)
    assert node_group("h100", nodes=4).gpus == 32


def test_a_rollout_pool_may_be_of_another_kind():
    cluster = parse_cluster(16, "h100", rollout_gpus=8, rollout_gpu="h20", price=2.0)
    assert [p.profile.name for p in cluster.node_groups] == ["h100_sxm", "h20_sxm"]
    assert cluster.node_groups[1].profile.price.value == 2.0
    assert node_group("h20", 8, nic=25e9).profile.nic.value == 25e9
    assert [p.gpus for p in parse_cluster(16, "h100", rollout_gpus=8).node_groups] == [16, 8]


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": 0},
        {"gpus": -8},
        {"gpus": 10**9},
        {"gpus": True},
        {},
        {"nodes": 0},
        {"gpus": 8, "gpus_per_node": 0},
        {"gpus": 8, "nodes": 2},
        {"gpus": 8, "oversubscription": 0.5},
        {"gpus": 8, "oversubscription": float("nan")},
        {"gpus": 8, "price": -1.0},
        {"gpus": 8, "nic": 0.0},
        {"gpus": 8, "nic": float("inf")},
        {"gpus": 8, "rollout_gpu": "h20"},
        {"gpus": 8, "rollout_gpus": 0},
        {"gpus": 8, "gpu": "z9"},
    ],
)
def test_absurd_clusters_are_refused(wrong):
    of_nodes = {"nodes", "nic"} & wrong.keys()
    with pytest.raises(RlhfsimError):
        node_group("h100_sxm", **wrong) if of_nodes else parse_cluster(**wrong)


def test_a_pool_takes_a_profile_that_is_already_loaded():
    profile = load_profile("l4")
    assert node_group(profile, 3).profile is profile


def test_a_cluster_is_read_from_yaml(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "node_groups:\n  - {gpu: h100, gpus: 64}\n  - {gpu: h20, nodes: 2, nic: 200 Gbit/s, price: 2.10 USD/h}\n"
        "oversubscription: 2\n"
    )
    cluster = cluster_from(parse_yaml(path.read_text(), str(path)))
    assert [p.gpus for p in cluster.node_groups] == [64, 16]
    assert node_group("h20", 8, nic=25e9).profile.nic.value == 25e9
    assert cluster.oversubscription == 2


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("node_groups:\n  - {gpu: h100, gpus: 0}\n", "bad-value", 2),
        ("node_groups:\n  - {gpu: h1000, gpus: 8}\n", "unknown-hardware-profile", 2),
        ("node_groups: []\n", "bad-value", 1),
        ("pool: []\n", "unknown-key", 1),
        ("oversubscription: 2\n", "missing-key", 1),
        ("3\n", "not-a-mapping", 1),
        ("node_groups:\n  - {gpu: h100}\n", "missing-value", 2),
        ("node_groups:\n  - {gpu: h100, gpus: 9, nodes: 1}\n", "gpus-against-nodes", 2),
        ("node_groups:\n  - {gpu: h100, gpus: 8}\noversubscription: 0.1\n", "bad-value", 3),
    ],
)
def test_a_wrong_cluster_file_is_told_with_its_line(tmp_path, text, code, line):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(RlhfsimError) as caught:
        cluster_from(parse_yaml(path.read_text(), str(path)))
    assert caught.value.code == code
    assert line is None or caught.value.place.line == line


def test_profiles_are_found_from_any_directory(tmp_path):
    code = "from rlhfsim.specs.hardware.profiles import load_profile; assert load_profile('h100').name == 'h100_sxm'"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["/dev/zero", "/", "no/such/file.yaml", "nul\0.yaml"])
def test_paths_that_are_no_text_file_are_refused(name):
    with pytest.raises(RlhfsimError) as caught:
        load_profile(Path(name))
    assert caught.value.code in ("unreadable-file", "file-too-large")
