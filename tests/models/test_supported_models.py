"""The README claims the families that agree with a reference model, and no others."""

from supported_models import ROOT, in_readme, references

from jaxserve.models.gemma3 import WITH_VISION
from jaxserve.models.registry import MODELS


def test_every_family_agrees_with_a_reference_model():
    for model in MODELS:
        if model is not WITH_VISION:  # the text half of one that is
            assert references(model), model.hf_architectures


def test_the_readme_has_the_table_of_these_tests():
    text = (ROOT / "README.md").read_text()
    assert in_readme(text) == text, "run: python tests/models/supported_models.py"
