import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.network.head import locate_head


def _trained_behind(model, batch, name, seed=0, **options):
    return dm.observe(model.train(), batch, defenses=(dm.defense(name, **options),), seed=seed)


def test_precode_puts_its_bottleneck_before_the_head_that_was(classifier, batch):
    exposure = _trained_behind(classifier, batch, "precode", width=4)
    bottleneck, head = exposure.model[5].bottleneck, exposure.model[5].head
    assert locate_head(exposure.model, (1, 8, 8))[0] == "5.head"
    assert torch.equal(head.weight, classifier[5].weight)
    assert set(exposure.update) == {name for name, _ in exposure.model.named_parameters()}
    model = exposure.model.eval()
    features = classifier.eval()[:5](batch.inputs)
    mean = features @ bottleneck.encoder.weight[:4].T + bottleneck.encoder.bias[:4]
    assert torch.allclose(model(batch.inputs), classifier[5](bottleneck.decoder(mean)), atol=1e-6)


def test_precode_draws_with_the_encoded_deviation(classifier, batch):
    bottleneck = _trained_behind(classifier, batch, "precode", width=4).model[5].bottleneck
    features = torch.rand(1, 12).expand(20_000, 12)
    mean, log_variance = bottleneck.encoder(features[:1]).chunk(2, -1)
    bottleneck.decoder = nn.Identity()
    drawn = bottleneck(features)
    assert torch.allclose(drawn.mean(0), mean[0], atol=0.05)
    assert torch.allclose(drawn.std(0), (log_variance[0] / 2).exp(), rtol=0.05)


def test_precode_of_a_model_that_is_its_head(batch):
    flat = dm.Batch(batch.inputs.flatten(1), batch.targets)
    exposure = _trained_behind(nn.Linear(64, 10), flat, "precode", width=3)
    assert set(exposure.update) == {f"bottleneck.{part}.{kind}" for part in ("encoder", "decoder") for kind in ("weight", "bias")} | {
        "head.weight",
        "head.bias",
    }


def test_a_width_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"defense\.width: expected a positive int"):
        dm.defense("precode", width=0)
