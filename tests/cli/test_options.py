"""A problem in one word, both ways, and the device of a command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tl_backend.cli.options import ARCHES, EXAMPLE, device_of, format_problem, parse_problem
from tl_backend.configs.identity import device_identity
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, UnsupportedError
from tl_backend.problem import DTYPES, FLOAT8_DTYPES, MAX_SOFT_CAP, MIN_SOFT_CAP, SUPPORTED_HEAD_DIMS, AttentionProblem


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    kv_heads, head_dim, dtype = (
        draw(st.integers(1, 99)),
        draw(st.sampled_from(SUPPORTED_HEAD_DIMS)),
        draw(st.sampled_from(DTYPES)),
    )
    page = draw(st.none() | st.integers(1, 300).map(lambda n: 16 * n))
    return AttentionProblem(
        num_q_heads=kv_heads * draw(st.integers(1, 71)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        kv_dtype=dtype if page is None else draw(st.sampled_from((dtype, *FLOAT8_DTYPES))),
        out_dtype=dtype,
        page_size=page,
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 2**30)),
        soft_cap=draw(st.none() | st.floats(MIN_SOFT_CAP, MAX_SOFT_CAP)),
        sinks_dtype=draw(st.sampled_from((None, *DTYPES))),
        has_alibi=draw(st.booleans()),
        returns_lse=draw(st.booleans()),
    )


@given(problems())
def test_a_problem_comes_back_from_its_word(problem: AttentionProblem) -> None:
    assert parse_problem(format_problem(problem)) == problem


@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_words_means_nothing(problem: AttentionProblem, random) -> None:
    words = format_problem(problem).split(",")
    random.shuffle(words)
    assert parse_problem(" , ".join(words)) == problem


@given(st.text("/,=0123456789.Dpagecontiuskvwlfb_e+-", max_size=40))
def test_any_text_is_a_problem_or_one_clear_error(text: str) -> None:
    try:
        problem = parse_problem(text)
    except (InvalidInputError, UnsupportedError) as error:
        assert str(error).count("\n") == 0
    else:
        assert parse_problem(format_problem(problem)) == problem


def test_the_example_and_its_short_form() -> None:
    assert format_problem(parse_problem(EXAMPLE)) == EXAMPLE
    assert parse_problem("32/8,D128,page16,bf16") == parse_problem(EXAMPLE)
    assert parse_problem("8/8,D64,contiguous,fp16,full,sinks,cap=50").soft_cap == 50.0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("", "'' is no word of it"),
        ("32/8,D128,page16", "it has no dtype, such as bfloat16"),
        ("32/8,D128,bfloat16", "it has no page_size, such as page16"),
        ("32/8,D128,page16,bfloat16,windw=5", "'windw=5' is no word of it"),
        ("32/8,D128,page16,contiguous,bfloat16", "it says page_size twice"),
        ("32/8,D128,page16,bfloat16,causal,full", "it says causal twice"),
        ("32/8,D128,page16,bfloat16,cap=1.2.3", "'cap=1.2.3' is no word of it"),
    ],
)
def test_what_is_wrong_with_a_word_is_said(word: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_problem(word)
    assert message in str(caught.value)
    assert EXAMPLE in str(caught.value)


@pytest.mark.parametrize(
    "word", ["32/8,D72,page16,bfloat16", "32/8,D128,page24,bfloat16", "32/8,D128,page16,bfloat16,kv=int8"]
)
def test_what_no_kernel_serves_is_refused_as_elsewhere(word: str) -> None:
    with pytest.raises(UnsupportedError):
        parse_problem(word)


@pytest.mark.parametrize("arch", ARCHES)
def test_every_architecture_can_be_named(arch: str) -> None:
    assert device_of(arch) == DeviceSpec.absent(arch)


def test_devices() -> None:
    assert device_of("sm_90a").arch == "sm_90"
    assert device_of("h100_pcie").multiprocessors == 114
    assert device_of("mi300x") == device_of("amd_mi300x")
    assert device_identity(device_of("h200")).name == "nvidia_h200"
    assert device_of("sm_90", 78).multiprocessors == 78
    assert device_of().is_gpu in (True, False)
    with pytest.raises(InvalidInputError, match="sm_91"):
        device_of("sm_91")
    with pytest.raises(InvalidInputError, match="--arch"):
        device_of(None, 78)
