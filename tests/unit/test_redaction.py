from __future__ import annotations

import pytest

from ringmpi.redaction import anonymous, redacted

#: Made up, in the forms that the real ones have. In parts, so that no scanner takes them for real ones.
GITHUB = "ghp_" + "a1B2c3D4" * 4
GITLAB = "glpat-" + "a1B2c3D4e5"
HUGGING_FACE = "hf_" + "a1B2c3D4" * 3
AWS = "AKIA" + "A1B2C3D4E5F6G7H8"
JWT = "eyJhbGciOiJIUzI1" + ".eyJleHAiOjE3MDAwMDB9" + ".c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("https://me:hunter2@git.example.org/x.git", "hunter2"),
        (f"https://{GITLAB}@git.example.org/x.git", GITLAB),
        ("ringmpi run --input s3://KEYID:hunter2@bucket/qkv.h5", "hunter2"),
        ("--api-token hunter2 --seq-len 64", "hunter2"),
        ("--password=hunter2", "hunter2"),
        ("MY_SECRET: hunter2", "hunter2"),
        ("out?access_key=hunter2&x=1", "hunter2"),
        *((f"results/{key}.h5", key) for key in (GITHUB, GITLAB, HUGGING_FACE, AWS, JWT)),
    ],
)
def test_secrets_are_known_by_their_form(text: str, secret: str) -> None:
    told = redacted(text, {})

    assert secret not in told
    assert "[redacted]" in told


@pytest.mark.parametrize(
    "text",
    [
        "ringmpi run --seq-len 4096 --causal --input /data/qkv_tokens=512.h5 --output r.h5",
        "--link 100Mbit/s,1ms --slow 2:2.5",
        "author=me; keys: 7; passq; https://example.org/a@b",
        "UCX_TLS=rc,cuda_copy FI_PROVIDER=cxi",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text, {}) == text


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "SLURM_JWT",
        "SLURM_MY_TOKEN",
        "UCX_AUTH",
        "MY_PASSWORD",
        "KEY",
        "DB_PASS",
    ],
)
def test_a_secret_of_the_environment_is_found_anywhere(name: str) -> None:
    assert redacted("results/open-sesame.h5", {name: "open-sesame"}) == "results/[redacted].h5"


@pytest.mark.parametrize(
    "environment",
    [{"MY_TOKEN": "1"}, {"MY_TOKEN": ""}, {"UCX_TLS": "results"}, {"MONKEY_BARS": "results/x.h5"}],
    ids=str,
)
def test_short_values_and_other_variables_are_left_alone(environment: dict[str, str]) -> None:
    assert redacted("results/x.h5 1", environment) == "results/x.h5 1"


def test_the_longer_of_two_secrets_goes_as_a_whole() -> None:
    environment = {"A_TOKEN": "sesame-open", "B_TOKEN": "sesame-open-wide"}

    assert redacted("x sesame-open-wide", environment) == "x [redacted]"


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("/home/ada/x", {"HOME": "/home/ada"}, "~/x"),
        ("/home/adam/x", {"HOME": "/home/ada"}, "/home/adam/x"),
        ("/scratch/ada/x, pytest-of-ada", {"USER": "ada"}, "/scratch/<user>/x, pytest-of-<user>"),
        ("/users/p1/ada", {"HOME": "/users/p1/ada"}, "~"),
        ("/lustre/ada/x", {"HOME": "/users/p1/ada"}, "/lustre/<user>/x"),
        ("SLURM_JOB_NAME=ada", {"SLURM_JOB_USER": "ada"}, "SLURM_JOB_NAME=<user>"),
        ("Canada, adapter", {"USER": "ada"}, "Canada, adapter"),
        ("/root/x by root", {"HOME": "/root", "USER": "root"}, "~/x by root"),
        ("/x me", {"USER": "me"}, "/x me"),
        ("/x", {"HOME": "/"}, "/x"),
        ("token=abcd /home/ada", {"HOME": "/home/ada"}, "token=[redacted] ~"),
    ],
)
def test_nobody_is_named(text: str, environment: dict[str, str], expected: str) -> None:
    assert anonymous(text, environment) == expected
