from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringmpi.config import Experiment, experiment_from, options, parse, read_toml, verify_rows
from ringmpi.devices import MAX_HEAD_DIM
from ringmpi.errors import BAD_PARAMETER, ConfigError


def assert_refused(told: list[str], refusal: pytest.ExceptionInfo[ConfigError]) -> None:
    message = str(refusal.value)
    assert [part for part in told if part not in message] == [], message
    assert "\n" not in message
    assert refusal.value.exit_code == BAD_PARAMETER == 2
    assert refusal.value.everywhere


PACE: dict[str, Any] = {"device": "paced", "flops": 50e12}

#: An option, a value that breaks its rule, and what the message must hold: the value and what would work.
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "seq_len 0": ({"seq_len": 0}, ["seq_len=0", "1 or more"]),
    "seq_len -7": ({"seq_len": -7}, ["seq_len=-7", "1 or more"]),
    "batch 0": ({"batch": 0}, ["batch=0", "1 or more"]),
    "heads 0": ({"heads": 0}, ["heads=0", "1 or more"]),
    "kv_heads negative": ({"kv_heads": -1}, ["kv_heads=-1", "1 or more"]),
    "kv_heads do not divide": ({"heads": 8, "kv_heads": 3}, ["heads=8", "kv_heads=3", "must divide"]),
    "more kv_heads": ({"heads": 2, "kv_heads": 4}, ["heads=2", "kv_heads=4", "must divide"]),
    "repeats 0": ({"repeats": 0}, ["repeats=0", "1 or more"]),
    "warmup -1": ({"warmup": -1}, ["warmup=-1", "0 or more"]),
    "seed -1": ({"seed": -1}, ["seed=-1", "0 or more"]),
    "chunk_limit 0": ({"chunk_limit": 0}, ["chunk_limit=0", "1 or more"]),
    "head_dim 0": ({"head_dim": 0}, ["head_dim=0", "from 1 to 256"]),
    "head_dim 257": ({"head_dim": 257}, ["head_dim=257", "from 1 to 256"]),
    "ranks 0": ({"ranks": 0}, ["ranks=0", "1 or more"]),
    "timeout 0": ({"timeout": 0.0}, ["timeout=0.0", "positive"]),
    "timeout nan": ({"timeout": float("nan")}, ["timeout=nan", "positive"]),
    "timeout inf": ({"timeout": float("inf")}, ["timeout=inf", "positive"]),
    "scale inf": ({"softmax_scale": float("inf")}, ["softmax_scale=inf", "finite"]),
    "scale nan": ({"softmax_scale": float("nan")}, ["softmax_scale=nan", "finite"]),
    "window -1": ({"window": -1}, ["window=-1", "0 (only the own key) or more"]),
    "window beyond 64 bits": ({"window": 2**63}, [f"window={2**63}"]),
    "seed beyond 2**53": ({"seed": 2**53 + 1}, [f"seed={2**53 + 1}", "at most 2**53"]),
    "documents falling": ({"documents": (0, 9, 5, 17)}, ["documents=0,9,5,17", "never fall"]),
    "documents late": ({"documents": (1, 17)}, ["documents=1,17", "start at 0"]),
    "documents too short": ({"documents": (0, 16)}, ["documents=0,16", "17"]),
    "documents too long": ({"documents": (0, 18)}, ["documents=0,18", "17"]),
    "dtype": ({"dtype": "float23"}, ["dtype='float23'", "bfloat16, float16", "did you mean"]),
    "layout": ({"layout": "zigzack"}, ["layout='zigzack'", "did you mean 'zigzag'"]),
    "method": ({"method": "rings"}, ["method='rings'", "did you mean 'ring'"]),
    "method of two words": (
        {"method": "double ring"},
        ["method='double ring'", "did you mean 'double-ring'"],
    ),
    "method in capitals": ({"method": "allGather"}, ["method='allGather'", "did you mean 'allgather'"]),
    "two methods": ({"method": "ring,passq"}, ["method='ring,passq'", "bidirectional", "ulysses"]),
    "all methods": ({"method": "all"}, ["method='all'", "allgather"]),
    "query_len 0": ({"query_len": 0}, ["query_len=0", "1 or more"]),
    "query_len -3": ({"query_len": -3}, ["query_len=-3", "1 or more"]),
    "query_len beyond the sequence": ({"query_len": 18}, ["query_len=18", "17 positions"]),
    "ulysses_degree 0": ({"ulysses_degree": 0}, ["ulysses_degree=0", "1 or more"]),
    "inner -1": ({"inner": -1}, ["inner=-1", "1 or more"]),
    "inner of another method": ({"inner": 0, "method": "ring"}, ["inner=0", "1 or more"]),
    "link without latency": ({"link": "100Mbit/s"}, ["link='100Mbit/s'", "RATE,LATENCY"]),
    "link in bytes": ({"link": "100MB/s,1ms"}, ["link='100MB/s,1ms'", "such as 100Mbit/s,1ms"]),
    "link without unit": ({"link": "100,1"}, ["link='100,1'", "RATE,LATENCY"]),
    "link that moves nothing": ({"link": "0bit/s,1ms"}, ["link='0bit/s,1ms'", "a rate above 0"]),
    "link beyond all numbers": ({"link": "1e999bit/s,1ms"}, ["link='1e999bit/s,1ms'"]),
    "link that never arrives": ({"link": "1Gbit/s,1e999s"}, ["link='1Gbit/s,1e999s'"]),
    "link backwards in time": ({"link": "1Gbit/s,-1ms"}, ["link='1Gbit/s,-1ms'"]),
    "link of another kind": ({"link": "1Gbit/s,1ms,split"}, ["link='1Gbit/s,1ms,split'", ",shared"]),
    "map of one link": ({"link_map": "4:1Gbit/s,1ms"}, ["link_map='4:1Gbit/s,1ms'", "INTRA:INTER"]),
    "map of wrong links": (
        {"link_map": "4:1Gbit/s,1ms:2Gb/s,1ms"},
        ["link='2Gb/s,1ms'", "RATE,LATENCY"],
    ),
    "link and map": (
        {"link": "1Gbit/s,1ms", "link_map": "4:1Gbit/s,1ms:1Gbit/s,1ms"},
        ["link=1Gbit/s,1ms", "link_map=4:", "give one of them"],
    ),
    "link of nothing": ({"link": ""}, ["link: is empty", "leave the option away"]),
    "device": ({"device": "nunpy"}, ["device='nunpy'", "did you mean 'numpy'"]),
    "threads 0": ({"threads": 0}, ["threads=0", "from 1 to"]),
    "threads of numpy": (
        {"threads": 2, "device": "numpy"},
        ["threads=2", "OMP_NUM_THREADS", "--device native"],
    ),
    "matrix_unit": ({"matrix_unit": "yes"}, ["matrix_unit='yes'", "auto, off, on"]),
    "weights": ({"weights": "half"}, ["weights='half'", "exact, rounded"]),
    "weights of float32": ({"weights": "rounded"}, ["weights=rounded", "dtype=float32", "use exact"]),
    "weights of nothing": (
        {"weights": "rounded", "dtype": "bfloat16", "device": "paced", "flops": 1e12},
        ["weights=rounded", "device=paced"],
    ),
    "matrix_unit of numpy": (
        {"matrix_unit": "on", "device": "numpy"},
        ["matrix_unit=on", "--device native"],
    ),
    "matrix_unit with nothing to do": (
        {"matrix_unit": "on", "dtype": "float16"},
        ["matrix_unit=on", "dtype=float16", "bfloat16"],
    ),
    "paced without a pace": ({"device": "paced"}, ["device=paced", "--flops 50e12"]),
    "pace of another device": (
        {"flops": 1e12},
        ["flops=1000000000000.0", "device=auto", "--device paced"],
    ),
    "pace of numpy": ({"flops": 1e12, "device": "numpy"}, ["device=numpy", "leave flops away"]),
    "pace 0": ({"flops": 0.0, "device": "paced"}, ["flops=0.0", "positive finite"]),
    "pace inf": ({"flops": float("inf"), "device": "paced"}, ["flops=inf", "positive finite"]),
    "pace nan": ({"flops": float("nan"), "device": "paced"}, ["flops=nan", "positive finite"]),
    "slow ranks of another device": ({"slow": "1:2"}, ["slow=1:2", "device=auto", "leave slow away"]),
    "slow without a factor": (PACE | {"slow": "1"}, ["slow='1'", "RANK:FACTOR", "2:2.5,5:1.5"]),
    "slow by nothing": (PACE | {"slow": "1:0"}, ["slow='1:0'", "above 0"]),
    "slow backwards": (PACE | {"slow": "1:-2"}, ["slow='1:-2'", "above 0"]),
    "slow for ever": (PACE | {"slow": "1:inf"}, ["slow='1:inf'", "RANK:FACTOR"]),
    "slow twice": (PACE | {"slow": "1:2,1:3"}, ["slow='1:2,1:3'", "each rank once"]),
    "threads of a paced device": (PACE | {"threads": 2}, ["threads=2", "--device native"]),
    "verdict on nothing": (PACE | {"verify": "full"}, ["verify=full", "device=paced", "use none"]),
    "sampled verdict on nothing": (PACE | {"verify": "sample:3"}, ["verify=sample:3", "use none"]),
    "inputs of nothing": (PACE | {"store_inputs": True}, ["store_inputs", "device=paced"]),
    "progress": ({"progress": "pole"}, ["progress='pole'", "did you mean 'poll'"]),
    "io": ({"io": "shard"}, ["io='shard'", "did you mean 'shards'"]),
    "shards of nothing": (PACE | {"io": "shards"}, ["io=shards", "device=paced", "leave it away"]),
    "verify": ({"verify": "some"}, ["verify='some'", "full, sample:ROWS", "none"]),
}


@pytest.mark.parametrize(("given", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_a_value_that_breaks_its_rule_is_refused_with_what_would_work(
    given: dict[str, Any], told: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        experiment_from({"seq_len": 17} | given)

    assert_refused(told, refusal)


ACCEPTED: dict[str, dict[str, Any]] = {
    "one token": {"seq_len": 1},
    "widest head": {"head_dim": MAX_HEAD_DIM},
    "window 0": {"window": 0},
    "window longer than the sequence": {"window": 1000},
    "empty documents": {"documents": (0, 0, 5, 5, 17, 17)},
    "one KV head": {"heads": 7, "kv_heads": 1},
    "no warm-up": {"warmup": 0},
    "negative scale": {"softmax_scale": -0.5},
    "scale 0": {"softmax_scale": 0.0},
    "small chunks": {"chunk_limit": 1},
    "sampled": {"verify": "sample:1"},
    "one query": {"query_len": 1, "method": "passq"},
    "all queries": {"query_len": 17},
    "groups of one": {"ulysses_degree": 1, "inner": 1},
    # Whether it divides the ranks, only a job knows.
    "groups of many": {"ulysses_degree": 2**20, "method": "hybrid"},
    "link": {"link": "2.5Gbit/s,0s"},
    "links by topology": {"link_map": "4:2Gbit/s,1us:1Gbit/s,1ms,shared:2-3=1bit/s,0s"},
    "paced": PACE,
    "paced without a verdict": PACE | {"verify": "none"},
    "slow ranks": PACE | {"slow": "0:1,7:0.5,12:2."},
    "one link a rank": {"link": "1e3kbit/s,10us,shared"},
    "backward": {"backward": True, "dtype": "bfloat16"},
    "threads": {"threads": 3, "device": "native"},
    "matrix unit": {"matrix_unit": "on", "dtype": "bfloat16"},
    "threads, if there is a device that has them": {"threads": 3, "device": "auto"},
    "numpy without a matrix unit": {"device": "numpy", "matrix_unit": "off"},
}


@pytest.mark.parametrize("given", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_a_value_at_the_edge_of_its_rule_is_taken(given: dict[str, Any]) -> None:
    experiment = experiment_from({"seq_len": 17} | given)

    assert {name: getattr(experiment, name) for name in given} == given


def test_the_defaults_are_those_of_the_manual() -> None:
    experiment = experiment_from({"seq_len": 17})

    wanted = {
        "batch": 1,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 64,
        "dtype": "float32",
        "causal": False,
        "window": None,
        "documents": None,
        "softmax_scale": None,
        "layout": "contiguous",
        "method": "ring",
        "device": "auto",
        "threads": 1,
        "matrix_unit": "auto",
        "weights": "exact",
        "progress": "poll",
        "repeats": 3,
        "warmup": 1,
        "seed": 0,
        "timeout": 60.0,
        "ranks": None,
        "check_transfers": False,
        "query_len": None,
        "ulysses_degree": None,
        "inner": None,
        "backward": False,
        "link": None,
        "verify": "full",
        "output": None,
    }
    assert {name: getattr(experiment, name) for name in wanted} == wanted


def test_what_is_paced_is_not_verified_and_says_so_in_its_name() -> None:
    paced, plain = experiment_from({"seq_len": 17} | PACE), experiment_from({"seq_len": 17})

    assert (paced.computes, paced.verify, plain.computes, plain.verify) == (False, "none", True, "full")
    assert "paced" in paced.name


@pytest.mark.parametrize(("heads", "kv_heads"), [(None, 8), (3, 3)], ids=["default", "given"])
def test_there_are_as_many_kv_heads_as_heads_unless_told(heads: int | None, kv_heads: int) -> None:
    given = {"seq_len": 17} | ({} if heads is None else {"heads": heads})

    assert experiment_from(given).kv_heads == kv_heads


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("seqlen", "seq_len"), ("head_dims", "head_dim"), ("layuot", "layout")],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        experiment_from({"seq_len": 17, name: 1})

    assert_refused([name, f"did you mean {nearest}?"], refusal)


@pytest.mark.parametrize("given", [{}, {"seq_len": 17, "input": "x.h5"}], ids=["neither", "both"])
def test_inputs_are_either_generated_or_from_a_file(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        experiment_from(given)

    assert_refused(["--seq-len N", "--input FILE"], refusal)


FOUND = {
    "batch": 2,
    "heads": 6,
    "kv_heads": 3,
    "seq_len": 17,
    "head_dim": 5,
    "dtype": "float64",
    "documents": (0, 5, 17),
}


class TestInputFile:
    def test_its_own_words_are_taken(self) -> None:
        experiment = experiment_from({"input": "x.h5"}, FOUND)

        assert {name: getattr(experiment, name) for name in FOUND} == FOUND

    @pytest.mark.parametrize("name", sorted(set(FOUND) - {"dtype"}))
    def test_an_option_may_repeat_what_it_says(self, name: str) -> None:
        experiment = experiment_from({"input": "x.h5", name: FOUND[name]}, FOUND)

        assert getattr(experiment, name) == FOUND[name]

    @pytest.mark.parametrize(
        ("name", "value", "shown"),
        [
            ("batch", 1, "2"),
            ("heads", 3, "6"),
            ("kv_heads", 6, "3"),
            ("seq_len", 16, "17"),
            ("head_dim", 64, "5"),
            ("documents", (0, 17), "0,5,17"),
        ],
    )
    def test_an_option_that_contradicts_it_is_refused(self, name: str, value: Any, shown: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            experiment_from({"input": "x.h5", name: value}, FOUND)

        told = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        assert_refused([f"{name}={told}", f"x.h5 has {name}={shown}", "leave the option away"], refusal)

    def test_fewer_queries_than_keys_are_its_own_words_too(self) -> None:
        found = FOUND | {"query_len": 5}

        for given in ({}, {"query_len": 5}):
            experiment = experiment_from({"input": "x.h5"} | given, found)
            assert (experiment.query_len, experiment.num_queries) == (5, 5)
        with pytest.raises(ConfigError) as refusal:
            experiment_from({"input": "x.h5", "query_len": 4}, found)
        assert_refused(["query_len=4", "x.h5 has query_len=5", "leave the option away"], refusal)

    def test_a_dtype_asks_for_a_conversion(self) -> None:
        assert experiment_from({"input": "x.h5", "dtype": "float32"}, FOUND).dtype == "float32"

    def test_documents_may_be_given_where_it_has_none(self) -> None:
        found = {name: value for name, value in FOUND.items() if name != "documents"}

        experiment = experiment_from({"input": "x.h5", "documents": (0, 17)}, found)

        assert experiment.documents == (0, 17)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"seq_len": 17}, "ring-n17-b1-h8-d64-float32-contiguous"),
        (
            {"seq_len": 17, "heads": 6, "kv_heads": 2, "causal": True, "window": 0, "layout": "zigzag"},
            "ring-n17-b1-h6-2-d64-float32-causal-w0-zigzag",
        ),
        (
            {"seq_len": 17, "documents": (0, 17), "dtype": "bfloat16", "batch": 3, "head_dim": 5},
            "ring-n17-b3-h8-d5-bfloat16-documents-contiguous",
        ),
        (
            {"seq_len": 17, "query_len": 3, "method": "passq", "backward": True, "causal": True},
            "passq-n17-q3-b1-h8-d64-float32-causal-backward-contiguous",
        ),
        (
            {"seq_len": 17, "method": "double-ring", "inner": 2, "link": "1Gbit/s,1ms"},
            "double-ring-n17-b1-h8-d64-float32-contiguous",
        ),
    ],
    ids=["plain", "masked", "packed", "few queries, backward", "groups and a link"],
)
def test_the_name_says_what_is_run(given: dict[str, Any], name: str) -> None:
    assert experiment_from(given).name == name


def test_the_name_of_a_run_on_a_file_holds_the_name_of_the_file() -> None:
    experiment = experiment_from({"input": "some/where/tensors.h5"}, FOUND)

    assert experiment.name.startswith("ring-tensors-b2-h6-3-d5-float64")


@pytest.mark.parametrize(
    "other",
    [
        {"query_len": 3},
        {"query_len": 17},
        {"backward": True},
        {"method": "hybrid"},
        {"inner": 2},
        {"ulysses_degree": 2},
        {"link": "1Gbit/s,1ms"},
        {"link": "1Gbit/s,1ms,shared"},
        {"link_map": "2:1Gbit/s,1ms:1Gbit/s,1ms"},
        PACE,
        PACE | {"slow": "1:2"},
    ],
    ids=str,
)
def test_no_two_experiments_share_the_name_of_a_file(other: dict[str, Any]) -> None:
    plain, changed = experiment_from({"seq_len": 17}), experiment_from({"seq_len": 17} | other)
    elsewhere = experiment_from({"seq_len": 17, "output": "x.h5", "ranks": 4} | other)

    assert plain.file_name(4) != changed.file_name(4)
    assert changed.file_name(4) != changed.file_name(3)
    # Where the file goes is no part of what is run.
    assert elsewhere.file_name(4) == changed.file_name(4)


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({"method": "hybrid", "ulysses_degree": 4, "inner": 2}, 4),
        ({"method": "double-ring", "ulysses_degree": 4, "inner": 2}, 2),
        ({"method": "hybrid", "inner": 2}, None),
        ({"method": "ulysses", "ulysses_degree": 4}, None),
        ({"method": "ring", "inner": 2}, None),
    ],
    ids=["degree", "inner", "the other's", "all ranks", "no groups"],
)
def test_a_group_has_the_ranks_of_the_option_of_its_method(
    given: dict[str, Any], ranks: int | None
) -> None:
    assert experiment_from({"seq_len": 17} | given).group_ranks == ranks


@pytest.mark.parametrize(
    "given",
    [
        {"seq_len": 17},
        {"seq_len": 17, "query_len": 3, "method": "passq", "backward": True, "inner": 2}
        | {"ulysses_degree": 4, "link": "1Gbit/s,1ms,shared"},
        {"seq_len": 17, "documents": (0, 5, 5, 17), "window": 3, "softmax_scale": 0.1 + 0.2},
        {"seq_len": 17, "output": "größe.h5", "seed": 2**53, "ranks": 3, "check_transfers": True},
    ],
    ids=["plain", "methods", "numbers", "texts"],
)
def test_the_record_survives_json(given: dict[str, Any]) -> None:
    experiment = experiment_from(given)

    record = json.loads(json.dumps(experiment.record()))
    if record["documents"] is not None:
        record["documents"] = tuple(record["documents"])

    assert set(record) == set(options())
    assert Experiment(**record) == experiment


def write_toml(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


class TestToml:
    def test_every_kind_of_option_can_be_given(self, tmp_path: Path) -> None:
        path = write_toml(
            tmp_path,
            """
            seq-len = 17
            head_dim = 5
            dtype = "float64"
            causal = true
            documents = [0, 5, 17]
            softmax-scale = 1
            timeout = 2.5
            query-len = 3
            method = "double-ring"
            ulysses_degree = 4
            inner = 2
            backward = true
            link = "1Gbit/s,1ms,shared"
            """,
        )

        experiment = experiment_from(read_toml(path))

        assert experiment == experiment_from(
            {
                "seq_len": 17,
                "head_dim": 5,
                "dtype": "float64",
                "causal": True,
                "documents": (0, 5, 17),
                "softmax_scale": 1.0,
                "timeout": 2.5,
                "query_len": 3,
                "method": "double-ring",
                "ulysses_degree": 4,
                "inner": 2,
                "backward": True,
                "link": "1Gbit/s,1ms,shared",
            }
        )
        assert isinstance(experiment.softmax_scale, float)

    @pytest.mark.parametrize("written", ["head-dims", "head_dims"])
    def test_an_unknown_key_is_refused_with_the_nearest_name(
        self, tmp_path: Path, written: str
    ) -> None:
        path = write_toml(tmp_path, f"seq-len = 17\n{written} = 5")

        with pytest.raises(ConfigError) as refusal:
            experiment_from(read_toml(path))

        assert_refused(["head_dims", "did you mean head_dim?"], refusal)

    def test_a_table_is_refused(self, tmp_path: Path) -> None:
        path = write_toml(tmp_path, "[run]\nseq-len = 17")

        with pytest.raises(ConfigError, match="run: no such option"):
            experiment_from(read_toml(path))

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ('seq-len = "many"', ["seq-len='many'", "a whole number"]),
            ("seq-len = 1.5", ["seq-len=1.5", "a whole number"]),
            ("seq-len = true", ["seq-len=True", "a whole number"]),
            ("seq-len = [17]", ["seq-len=[17]", "a whole number"]),
            ("query-len = 1.5", ["query-len=1.5", "a whole number"]),
            ("inner = true", ["inner=True", "a whole number"]),
            ("backward = 1", ["backward=1", "true or false"]),
            ("link = 100", ["link=100", "a text"]),
            ('method = ["ring", "passq"]', ["method=['ring', 'passq']", "a text"]),
            ("dtype = 32", ["dtype=32", "a text"]),
            ("causal = 1", ["causal=1", "true or false"]),
            ('causal = "false"', ["causal='false'", "true or false"]),
            ("timeout = true", ["timeout=True", "a number"]),
            ('timeout = "long"', ["timeout='long'", "a number"]),
            ("documents = 17", ["documents", "17"]),
            ("documents = true", ["documents", "rue"]),
            ("documents = 1.5", ["documents", "1.5"]),
            ("documents = [0, 1.5]", ["documents='0,1.5'", "whole numbers"]),
            ("documents = []", ["documents=''", "whole numbers"]),
            ('documents = "0;17"', ["documents='0;17'", "a list of whole numbers"]),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_value_of_the_wrong_type_is_refused(
        self, tmp_path: Path, line: str, told: list[str]
    ) -> None:
        path = write_toml(tmp_path, line)

        with pytest.raises(ConfigError) as refusal:
            read_toml(path)

        assert_refused(told, refusal)

    @pytest.mark.parametrize("text", ["seq-len 17", "seq-len = 1\nseq-len = 2", "=", "a = '"])
    def test_a_file_that_is_not_toml_is_refused(self, tmp_path: Path, text: str) -> None:
        path = write_toml(tmp_path, text)

        with pytest.raises(ConfigError, match=f"config={path}"):
            read_toml(path)

    def test_a_file_of_other_bytes_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "run.toml"
        path.write_bytes(b"\xff\xfe\x00")

        with pytest.raises(ConfigError, match=f"config={path}"):
            read_toml(str(path))

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "nowhere.toml"

        with pytest.raises(ConfigError, match=f"config={path}.*No such file"):
            read_toml(str(path))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seq_len", "17", 17),
        ("head-dim", "5", 5),
        ("timeout", "2", 2.0),
        ("softmax_scale", "1e-3", 1e-3),
        ("documents", "0,5,17", (0, 5, 17)),
        ("dtype", "bfloat16", "bfloat16"),
        ("no_such_option", "x", "x"),
    ],
)
def test_a_text_is_read_by_the_kind_of_its_option(name: str, text: str, value: Any) -> None:
    found = parse(name, text)

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("seq_len", "1k", "a whole number"),
        ("seq_len", "1.0", "a whole number"),
        ("seq_len", "", "a whole number"),
        ("timeout", "soon", "a number"),
        ("documents", "0,,17", "whole numbers like 0,512,769"),
        ("documents", "0,5,", "whole numbers like 0,512,769"),
    ],
)
def test_a_text_of_another_kind_is_refused(name: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(name, text)

    assert_refused([f"{name}={text!r}", told], refusal)


@pytest.mark.parametrize(
    ("how", "rows"), [("full", None), ("none", 0), ("sample:1", 1), ("sample:256", 256)]
)
def test_verify_says_how_many_rows(how: str, rows: int | None) -> None:
    assert verify_rows(how) == rows


@pytest.mark.parametrize(
    "how", ["", "Full", "sample", "sample:", "sample:0", "sample:-1", "sample:x", "sample:1.5", "all:3"]
)
def test_a_verify_that_means_nothing_is_refused(how: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        verify_rows(how)

    assert_refused([f"verify={how!r}", "full, sample:ROWS", "none"], refusal)
