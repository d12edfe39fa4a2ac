"""Transformers, ConvNeXt, MobileNetV3 and EfficientNet of timm: every family of attacks runs on them as they are."""

import importlib.machinery
import sys
import types

import pytest
import torch

import dosimeter as dm

MODELS = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2},
    "convnext_atto": {},
    "mobilenetv3_small_050": {},
    "efficientnet_lite0": {},
}
WITH_MAPS = ("mobilenetv3_small_050", "efficientnet_lite0")


class Loaders(types.ModuleType):
    """Stands in for a module of torchvision, which timm imports for loading data. No model uses it."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {mode: mode for mode in ("BICUBIC", "BILINEAR", "NEAREST", "LANCZOS", "HAMMING", "BOX")})


@pytest.fixture
def timm(monkeypatch):
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    if importlib.util.find_spec("torchvision") is None:
        parts = ("transforms", "transforms.functional", "transforms.v2", "datasets", "datasets.folder", "ops", "ops.misc", "models", "io")
        for name in ("torchvision", *(f"torchvision.{part}" for part in (*parts, "models.feature_extraction"))):
            module = Loaders(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], own, module)
    import timm

    yield timm
    for name in [name for name in sys.modules if name == "timm" or name.startswith("timm.")]:
        del sys.modules[name]  # it holds on to the stand-ins


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_family_of_attacks_runs(name, timm):
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=10, **MODELS[name]).eval()
    batch = dm.Batch(torch.rand(2, 3, 32, 32), torch.tensor([3, 7]))
    exposure = dm.observe(model, batch)
    labels = dm.recover_labels(exposure, "subspace")
    assert labels.certified
    assert labels.labels.tolist() == [3, 7]
    features = dm.recover_features(exposure, "subspace")
    assert bool(features.certified.all())
    assert dm.score(features, batch, exposure=exposure).details["false_certificates"] == 0
    for attack in ("dlg", "inverting_gradients"):
        found = dm.reconstruct(exposure, attack, labels=labels, steps=2)
        assert found.outcome is dm.Outcome.COMPLETED, (attack, found.message)
    if name in WITH_MAPS:
        maps = dm.recover_maps(exposure)
        assert bool(maps.certified.all())
        assert dm.score(maps, batch, exposure=exposure).details["false_certificates"] == 0
    else:
        with pytest.raises(dm.Refused, match="no layer shows its maps"):
            dm.recover_maps(exposure)
    imprint = dm.attack("imprint", input_shape=(3, 32, 32))
    found = dm.reconstruct(dm.observe(imprint.tamper(model), batch), imprint)
    assert found.outcome is dm.Outcome.COMPLETED, found.message
