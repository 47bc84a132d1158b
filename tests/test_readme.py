"""The README says what is so: its quotation of plain.py, its example, its commands, its table of options."""

import re
from pathlib import Path

import numpy as np

from numpy_sdpa import attention, plain, sdpa_backward, sdpa_forward
from numpy_sdpa._internal.options import AttentionOptions

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_plain_is_quoted_whole():
    assert Path(plain.__file__).read_text(encoding="utf-8") in blocks("python")


def test_plain_is_the_reference_without_options():
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal(shape) for shape in ((2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 2)))
    output, weights = plain.attention_forward(query, key, value)
    expected, residuals = sdpa_forward(query, key, value)
    np.testing.assert_allclose(output, expected, rtol=1e-13)
    grad_output = rng.standard_normal(output.shape)
    gradients = plain.attention_backward(grad_output, query, key, value, weights)
    for got, wanted in zip(gradients, sdpa_backward(grad_output, residuals)[:3], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)


def test_the_examples_run(capsys):
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert "(2, 2, 128, 64)" in capsys.readouterr().out


def test_the_first_commands_install_verify_and_test():
    install, tests = blocks("sh")[:2]
    assert "numpy-sdpa verify" in install
    assert "[test]" in tests
    assert "pytest" in tests


def test_every_option_is_in_the_table_and_in_the_docstring():
    table = README[README.index("| option | meaning |") :]
    for name in AttentionOptions.__annotations__:
        assert f"`{name}`" in table or f"`{name}=" in table, name
        assert name in attention.__doc__ or name in sdpa_forward.__doc__ or name in _long_docstring(), name


def _long_docstring():
    from numpy_sdpa import scaled_dot_product_attention

    return scaled_dot_product_attention.__doc__
