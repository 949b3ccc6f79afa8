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
    "device": ({"device": "nunpy"}, ["device='nunpy'", "did you mean 'numpy'"]),
    "progress": ({"progress": "pole"}, ["progress='pole'", "did you mean 'poll'"]),
    "io": ({"io": "mpio"}, ["io='mpio'", "gather"]),
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
        "progress": "poll",
        "repeats": 3,
        "warmup": 1,
        "seed": 0,
        "timeout": 60.0,
        "ranks": None,
        "check_transfers": False,
        "verify": "full",
        "output": None,
    }
    assert {name: getattr(experiment, name) for name in wanted} == wanted


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
    ],
    ids=["plain", "masked", "packed"],
)
def test_the_name_says_what_is_run(given: dict[str, Any], name: str) -> None:
    assert experiment_from(given).name == name


def test_the_name_of_a_run_on_a_file_holds_the_name_of_the_file() -> None:
    experiment = experiment_from({"input": "some/where/tensors.h5"}, FOUND)

    assert experiment.name.startswith("ring-tensors-b2-h6-3-d5-float64")


@pytest.mark.parametrize(
    "given",
    [
        {"seq_len": 17},
        {"seq_len": 17, "documents": (0, 5, 5, 17), "window": 3, "softmax_scale": 0.1 + 0.2},
        {"seq_len": 17, "output": "größe.h5", "seed": 2**53, "ranks": 3, "check_transfers": True},
    ],
    ids=["plain", "numbers", "texts"],
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
