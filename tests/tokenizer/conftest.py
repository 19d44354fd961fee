import pytest

from jserve.tokenizer import from_gguf
from jserve.weights.gguf import read_gguf
from tests.support.smollm2 import smollm2_gguf


@pytest.fixture(scope="session")
def smollm2_fields():
    """The real GGUF's metadata as plain values."""
    return read_gguf(smollm2_gguf()).fields


@pytest.fixture(scope="session")
def smollm2(smollm2_fields):
    return from_gguf(smollm2_fields)


@pytest.fixture(scope="session")
def hf_smollm2():
    """HF's own conversion of the GGUF, with the one thing it leaves out put right: digits are pieces of their own."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import pre_tokenizers

    path = smollm2_gguf()
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return reference
