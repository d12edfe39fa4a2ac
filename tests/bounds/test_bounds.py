"""Limits on every attacker: what each needs, how it moves with the noise, and what it refuses."""

import itertools
import math

import pytest
import torch
from scipy.special import ndtr, ndtri
from torch import nn

import dosimeter as dm
from dosimeter.bounds.van_trees import VanTrees
from dosimeter.engines.bounds.label_chance import best_blind_agreement
from dosimeter.engines.bounds.mechanism import mechanism_of
from dosimeter.engines.bounds.pixel_prior import PixelProblem
from dosimeter.registry import BOUNDS
from dosimeter.types import Refused


@pytest.fixture
def setting(digits):
    images, labels = digits
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
    return model, dm.Batch(images[:2].clone(), labels[:2].clone()), dm.Batch(images[500:800], labels[500:800])


def _found(ceilings, name):
    return next(ceiling for ceiling in ceilings.found if ceiling.bound == name)


def _noise(std):
    return (dm.defense("gaussian_noise", std=std),)


def test_more_noise_lowers_the_ceiling_down_to_the_prior(setting):
    model, batch, auxiliary = setting
    values = []
    for std in (1e-3, 1e-2, 1e-1, 10.0):
        found = _found(dm.ceilings(model, batch, defenses=_noise(std), auxiliary=auxiliary, bounds=["van_trees"]), "van_trees")
        values.append(float(found.values.max()))
    assert values == sorted(values, reverse=True)
    assert values[0] > 35
    assert values[-1] == pytest.approx(found.details["prior_psnr"][0], abs=0.01)


def test_without_noise_only_rounding_hides(setting):
    model, batch, auxiliary = setting
    ceilings = dm.ceilings(model, batch, auxiliary=auxiliary)
    found = _found(ceilings, "hidden_directions")
    assert not found.proved
    assert float(found.values.min()) > 100
    assert max(found.details["hidden"]) < 0.01
    assert "needs noise" in ceilings.refused["van_trees"]
    assert "needs Gaussian noise on a clipped update" in ceilings.refused["reconstruction_robustness"]


def test_a_narrow_layer_hides_what_it_does_not_pass(digits):
    """Behind a fixed map to 16 numbers, 48 of the 64 directions of a digit are hidden from every attacker."""
    images, labels = digits
    torch.manual_seed(4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    model[1].requires_grad_(False)
    found = _found(
        dm.ceilings(model, dm.Batch(images[:1], labels[:1]), auxiliary=dm.Batch(images[500:], labels[500:])), "hidden_directions"
    )
    assert found.details["hidden"][0] == pytest.approx(48, abs=0.5)
    assert found.details["prior_psnr"][0] + 0.5 < float(found.values[0]) < 30


def test_an_input_in_another_scale_has_the_same_ceiling_in_pixels(setting):
    model, batch, auxiliary = setting
    scale = dm.Normalization(mean=(0.4,), std=(0.2,))
    scaled = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
    scaled.load_state_dict(model.state_dict())

    class Rescaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = scaled

        def forward(self, inputs):
            return self.inside(inputs * 0.2 + 0.4)

    def normalised(samples):
        return dm.Batch((samples.inputs - 0.4) / 0.2, samples.targets)

    plain = dm.ceilings(model, batch, defenses=_noise(0.01), auxiliary=auxiliary)
    other = dm.ceilings(Rescaled(), normalised(batch), defenses=_noise(0.01), auxiliary=normalised(auxiliary), normalization=scale)
    assert torch.allclose(_found(plain, "van_trees").values, _found(other, "van_trees").values, atol=0.05)


def test_clipping_and_noise_limit_every_attacker_with_a_prior(setting):
    model, batch, auxiliary = setting
    by_sample = dm.ceilings(model, batch, defenses=(dm.defense("dpsgd", max_norm=1.0, noise_multiplier=2.0),), auxiliary=auxiliary)
    by_client = dm.ceilings(model, batch, defenses=(dm.defense("clipping", max_norm=0.5), *_noise(1.0)), auxiliary=auxiliary)
    for ceilings in (by_sample, by_client):
        found = _found(ceilings, "reconstruction_robustness")
        assert found.proved
        assert found.values.tolist() == pytest.approx([float(ndtr(ndtri(0.1) + 0.5))] * 2)


def test_a_switching_unit_takes_the_proof_away(setting):
    _, batch, auxiliary = setting
    smooth = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Sigmoid(), nn.Linear(8, 10))
    kinked = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    for model, proved in ((smooth, True), (kinked, False)):
        found = _found(dm.ceilings(model, batch, defenses=_noise(0.1), auxiliary=auxiliary), "van_trees")
        assert found.proved is proved
        assert any("jumps" in sentence for sentence in found.assumptions) is not proved


@pytest.mark.parametrize(
    ("defenses", "word"),
    [
        (("sign",), "no continuous function"),
        ((dm.defense("pruning", ratio=0.5), dm.defense("gaussian_noise", std=0.1)), "no continuous function"),
        ((dm.defense("mixup"),), "changes the data"),
    ],
)
def test_no_ceiling_is_made_up(setting, defenses, word):
    model, batch, auxiliary = setting
    ceilings = dm.ceilings(model, batch, defenses=defenses, auxiliary=auxiliary)
    assert not ceilings.found
    assert all(word in reason for reason in ceilings.refused.values())
    assert set(ceilings.refused) == set(BOUNDS)


def test_what_comes_after_the_noise_helps_nobody(setting):
    model, batch, auxiliary = setting
    behind = (*_noise(0.05), dm.defense("pruning", ratio=0.9))
    with_pruning = dm.ceilings(model, batch, defenses=behind, auxiliary=auxiliary)
    without = dm.ceilings(model, batch, defenses=_noise(0.05), auxiliary=auxiliary)
    assert torch.equal(_found(with_pruning, "van_trees").values, _found(without, "van_trees").values)


def test_no_auxiliary_samples_no_prior(setting):
    model, batch, _ = setting
    ceilings = dm.ceilings(model, batch, defenses=_noise(0.1))
    assert "auxiliary" in ceilings.refused["van_trees"]
    assert "auxiliary" in ceilings.refused["hidden_directions"]


def test_dropout_has_random_masks(setting):
    _, batch, auxiliary = setting
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    assert "dropout" in dm.ceilings(model, batch, auxiliary=auxiliary).refused["van_trees"]
    assert dm.ceilings(model.eval(), batch, auxiliary=auxiliary).found


def test_the_lowest_ceiling_prefers_a_proof(setting):
    model, batch, auxiliary = setting
    ceilings = dm.ceilings(model, batch, defenses=_noise(0.1), auxiliary=auxiliary)
    assert ceilings.lowest("inputs", "psnr").bound == "van_trees"
    assert ceilings.lowest("labels", "psnr") is None


@pytest.mark.parametrize("name", BOUNDS.names())
def test_every_bound_says_what_it_takes_for_granted(setting, name):
    model, batch, auxiliary = setting
    defenses = () if name == "hidden_directions" else (dm.defense("dpsgd", max_norm=1.0, noise_multiplier=1.0),)
    found = _found(dm.ceilings(model, batch, defenses=defenses, auxiliary=auxiliary, bounds=[name]), name)
    assert len(found.values) == 2
    assert all(math.isfinite(value) for value in found.values)
    assert all(sentence.endswith(".") for sentence in found.assumptions)
    again = _found(dm.ceilings(model, batch, defenses=defenses, auxiliary=auxiliary, bounds=[name]), name)
    assert torch.equal(found.values, again.values)


def test_inversion_influence_is_the_published_formula(setting):
    """Against ‖Jᵀδ‖/λmax computed from the whole Jacobian of a small net."""
    model, batch, auxiliary = setting
    defenses = _noise(0.01)
    found = _found(dm.ceilings(model, batch, defenses=defenses, auxiliary=auxiliary, bounds=["inversion_influence"]), "inversion_influence")
    jacobian = PixelProblem(mechanism_of(model, batch, defenses=defenses, auxiliary=auxiliary), "test").jacobian
    basis = torch.eye(64, dtype=torch.float64).reshape(64, 1, 8, 8)
    matrix = jacobian.normal(1, batch.inputs[1].double().expand(64, 1, 8, 8), basis).flatten(1)
    squared = float(matrix.trace() / torch.linalg.eigvalsh(matrix)[-1] ** 2)
    assert found.details["squared_influence"][1] == pytest.approx(squared, rel=0.3)  # the trace is estimated from four random signs
    assert float(found.values[1]) == pytest.approx(10 * math.log10(64 / squared), abs=1.2)


def test_the_bits_of_a_linear_update_are_its_mutual_information(setting):
    model, batch, auxiliary = setting
    few, many = (
        _found(dm.ceilings(model, batch, defenses=_noise(std), auxiliary=auxiliary), "hidden_directions").details["bits"]
        for std in (0.1, 0.01)
    )
    assert all(0 < low < high for low, high in zip(few, many))
    assert max(_found(dm.ceilings(model, batch, defenses=_noise(1e3), auxiliary=auxiliary), "hidden_directions").details["bits"]) < 1e-4


class HiddenSwitch(nn.Module):
    """A layer with parameters of its own and a switch that no module shows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 24) / 8)

    def forward(self, x):
        return torch.relu(x @ self.weight)


class HiddenContainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 24)

    def forward(self, x):
        return self.inner(x).abs()


@pytest.mark.parametrize(
    ("layer", "loss", "proved"),
    [
        (nn.Linear(64, 24), None, True),
        (nn.Linear(64, 24), nn.CrossEntropyLoss(), True),
        (HiddenSwitch(), None, False),
        (HiddenContainer(), None, False),
        (nn.Linear(64, 24), lambda logits, targets: (logits - targets[:, None]).abs().mean(), False),
    ],
)
def test_van_trees_is_proved_of_nothing_that_may_jump(setting, layer, loss, proved):
    _, batch, auxiliary = setting
    model = nn.Sequential(nn.Flatten(), layer, nn.Tanh(), nn.Linear(24, 10))
    options = {"loss": loss, "defenses": _noise(0.05), "auxiliary": auxiliary, "bounds": [VanTrees(points=16)]}
    assert dm.ceilings(model, batch, **options).found[0].proved is proved


def test_noise_on_some_layers_hides_nothing_of_the_others(setting):
    model, batch, auxiliary = setting
    ceilings = dm.ceilings(
        model, batch, auxiliary=auxiliary, defenses=(dm.defense("head_row_noise", std=0.5),), bounds=["van_trees", "hidden_directions"]
    )
    assert "needs noise" in ceilings.refused["van_trees"]
    assert float(_found(ceilings, "hidden_directions").values.min()) > 60


def test_an_update_that_is_drawn_at_random_has_no_ceiling(setting):
    model, batch, auxiliary = setting
    for defense in (dm.defense("dropout", rate=0.3), dm.defense("precode")):
        found = dm.ceilings(model, batch, auxiliary=auxiliary, defenses=(defense, *_noise(0.05)))
        assert not found.found
        assert all("drawn at random" in reason for reason in found.refused.values())


def test_the_labels_ceiling_is_the_chance_of_a_guess_moved_by_the_noise(setting):
    """Of one sample InsAcc is success, so that the bound is that of reconstruction robustness with a class's chance."""
    model, batch, _ = setting
    one = dm.Batch(batch.inputs[:1], batch.targets[:1])
    private = (dm.defense("dpsgd", max_norm=1.0, noise_multiplier=2.0),)
    found = _found(dm.ceilings(model, one, defenses=private, bounds=["label_robustness"]), "label_robustness")
    assert found.details["chance"] == pytest.approx(0.1)
    assert found.values.tolist() == pytest.approx([float(ndtr(ndtri(0.1) + 1 / 2))])
    two = _found(dm.ceilings(model, batch, defenses=private, bounds=["label_robustness"]), "label_robustness")
    assert two.values.tolist() == pytest.approx([float(ndtr(ndtri(two.details["chance"]) + 2 / 2))] * 2)
    soft = dm.Batch(batch.inputs, nn.functional.one_hot(batch.targets, 10).float())
    assert "one class a sample" in dm.ceilings(model, soft, defenses=private, bounds=["label_robustness"]).refused["label_robustness"]


@pytest.mark.parametrize("frequencies", [[0.5, 0.5], [0.7, 0.2, 0.1], [0.25] * 4])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_guess_agrees_more_than_the_bound_on_blind_agreement(frequencies, size):
    """Every guess of up to two labels too many, against all label batches, by brute force."""
    classes = range(len(frequencies))
    weights = {}
    for labels in itertools.product(classes, repeat=size):
        counts = tuple(labels.count(one) for one in classes)
        weights[counts] = weights.get(counts, 0.0) + math.prod(frequencies[label] for label in labels)
    best = 0.0
    for guess in itertools.product(range(size + 3), repeat=len(frequencies)):
        if 0 < sum(guess) <= size + 2:
            agreement = sum(weight * sum(map(min, guess, counts)) / sum(map(max, guess, counts)) for counts, weight in weights.items())
            best = max(best, agreement)
    bound = best_blind_agreement(torch.tensor(frequencies, dtype=torch.float64), size)
    assert best <= bound + 1e-12
    if size == 1:
        assert best == pytest.approx(bound)


@pytest.mark.parametrize(
    ("option", "message"), [("bounds", "bounds: expected the name of a bound"), ("auxiliary", "auxiliary: expected a Batch")]
)
def test_numbers_in_the_place_of_bounds_or_samples_are_refused(setting, option, message):
    model, batch, *_ = setting
    with pytest.raises(TypeError, match=message):
        dm.ceilings(model, batch, defenses=_noise(0.1), **{option: 3})


def test_auxiliary_samples_of_another_shape_are_refused_in_a_sentence(setting):
    model, batch, _ = setting
    other = dm.Batch(torch.rand(9, 1, 5, 5), torch.zeros(9, dtype=torch.int64))
    assert "expected samples of the private ones' shape (1, 8, 8), got (1, 5, 5)" in str(dm.ceilings(model, batch, auxiliary=other).refused)


def _values(model, batch, defenses, bound="van_trees", **options):
    (found,) = dm.ceilings(model, batch, defenses=defenses, bounds=[bound], **options).found
    return found


def test_dpsgd_adds_its_noise_before_a_clipping_that_is_listed_first(setting):
    model, batch, auxiliary = setting
    private, clip = dm.defense("dpsgd", max_norm=1.0, noise_multiplier=0.01), dm.defense("clipping", max_norm=1e-3)
    alone = _values(model, batch, (private,), "hidden_directions", auxiliary=auxiliary)
    for order in ((clip, private), (private, clip)):
        assert torch.equal(_values(model, batch, order, "hidden_directions", auxiliary=auxiliary).values, alone.values)


def test_a_step_of_the_training_counts_wherever_it_is_listed(setting):
    model, batch, auxiliary = setting
    local, noise = dm.defense("local_iterations", steps=3, learning_rate=0.5), dm.defense("gaussian_noise", std=0.05)
    first, last = (_values(model, batch, order, "hidden_directions", auxiliary=auxiliary) for order in ((local, noise), (noise, local)))
    assert torch.equal(first.values, last.values)
    assert abs(float(first.values[0]) - float(_values(model, batch, (noise,), "hidden_directions", auxiliary=auxiliary).values[0])) > 1


def test_a_layer_that_is_left_out_is_left_out_on_both_sides_of_the_noise(setting):
    model, batch, auxiliary = setting
    without, noise = dm.defense("head_withheld"), dm.defense("gaussian_noise", std=0.05)
    clip = dm.defense("clipping", max_norm=1.0)  # after the noise, its factor tells of the head that is left out behind it

    def values(*order):
        return _values(model, batch, order, "hidden_directions", auxiliary=auxiliary).values

    assert torch.equal(values(without, noise), values(noise, without))
    told = values(noise), values(noise, clip, without)
    assert torch.equal(*told)


@pytest.mark.parametrize(("name", "options"), [("gaussian_noise", {"std": 0.5}), ("laplace_noise", {"scale": 0.5})])
def test_noise_that_follows_the_update_proves_nothing(setting, name, options):
    model, batch, auxiliary = setting
    for relative in (True, False):
        found = _values(model, batch, (dm.defense(name, relative=relative, **options),), VanTrees(points=16), auxiliary=auxiliary)
        assert found.proved is not relative
        assert any("size of the noise follows" in sentence for sentence in found.assumptions) is relative


def test_a_loss_that_sums_tells_as_much_as_the_mean_behind_less_noise(setting):
    model, batch, auxiliary = setting
    local = [
        _values(model, batch, _noise(std), "hidden_directions", auxiliary=auxiliary, loss=nn.CrossEntropyLoss(reduction=kind)).values
        for std, kind in ((0.02, "sum"), (0.01, "mean"))
    ]
    assert torch.allclose(*local, atol=1e-6)


def test_a_loss_with_weights_is_computed_in_float64(setting):
    model, batch, auxiliary = setting
    plain, weighted = (
        _values(model, batch, _noise(0.01), "hidden_directions", auxiliary=auxiliary, loss=nn.CrossEntropyLoss(weight=weight)).values
        for weight in (None, torch.ones(10))
    )
    assert torch.allclose(plain, weighted, atol=1e-6)


def test_few_draws_of_the_prior_prove_nothing(setting):
    model, batch, auxiliary = setting
    few, enough = (
        dm.ceilings(model, batch, defenses=_noise(0.05), auxiliary=auxiliary, bounds=[VanTrees(points=points)]).found[0]
        for points in (15, 16)
    )
    assert not few.proved
    assert any("too few" in sentence for sentence in few.assumptions)
    assert enough.proved
    assert not any("too few" in sentence for sentence in enough.assumptions)


@pytest.mark.parametrize("seed", [10, 14])
def test_units_that_saturate_on_many_inputs_do_not_lower_the_ceiling(seed):
    """Where few inputs tell much and many tell nothing, two draws once gave a ceiling of up to 40 dB too little."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    for parameter in model.parameters():
        parameter.data *= 5
    auxiliary = dm.Batch(torch.randn(500, 12, dtype=torch.float64), torch.zeros(500, dtype=torch.int64))
    batch = dm.Batch(auxiliary.inputs[:1].clone(), torch.tensor([1]))
    options = {"defenses": _noise(0.01), "auxiliary": auxiliary}
    problem = PixelProblem(mechanism_of(model, batch, **options), "test")
    rng = torch.Generator().manual_seed(seed)
    average = torch.stack([problem._root(0, place) for place in problem.prior.draw(400, rng)])
    prior = problem.prior.root(torch.eye(12, dtype=torch.float64))
    squared = float((prior @ (torch.eye(12) + (average.mT @ average).mean(0)).inverse() @ prior).trace())
    for other in range(3):
        found = dm.ceilings(model, batch, bounds=["van_trees"], seed=other, **options).found[0]
        assert found.proved
        assert float(found.values[0]) > 10 * math.log10(12 / squared) - 1


def test_tiny_noise_hides_no_direction_that_is_faint(setting):
    """The map scales its inputs by 1 down to 1e-8. Its JᵀJ rounds the faint ones away; the noise is far below them."""
    scale = 10.0 ** -torch.arange(9, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 2, bias=False)).double()
    model[0].weight = nn.Parameter(torch.diag(scale), requires_grad=False)
    inputs = torch.randn(300, 9, dtype=torch.float64)
    batch, auxiliary = dm.Batch(inputs[:1], torch.tensor([0])), dm.Batch(inputs, torch.zeros(300, dtype=torch.int64))
    for name in ("van_trees", "hidden_directions"):
        found = _values(model, batch, _noise(1e-11), name, auxiliary=auxiliary)
        assert max(found.details["hidden"]) < 0.01


def test_a_hook_or_a_new_forward_takes_the_proof_away(setting):
    model, batch, auxiliary = setting
    hooked, patched = (nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)) for _ in range(2))
    hooked[1].register_forward_hook(lambda module, given, made: made.relu())
    patched[1].forward = lambda x: x[:, :8].relu()
    for tampered in (hooked, patched):
        assert not _values(tampered, batch, _noise(0.1), auxiliary=auxiliary).proved
    assert _values(model, batch, _noise(0.1), auxiliary=auxiliary).proved


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda model, auxiliary: auxiliary.inputs.__setitem__((3, 0, 2, 2), math.nan), "auxiliary: has NaN or infinite values"),
        (lambda model, auxiliary: auxiliary.inputs.__setitem__((3, 0, 2, 2), math.inf), "auxiliary: has NaN or infinite values"),
        (lambda model, auxiliary: model[1].weight.data.fill_(math.nan), "NaN"),
    ],
)
def test_broken_numbers_are_refused_in_a_sentence(setting, spoil, word):
    model, batch, auxiliary = setting
    auxiliary = dm.Batch(auxiliary.inputs.clone(), auxiliary.targets)
    spoil(model, auxiliary)
    for defenses in ((), _noise(0.1)):
        found = dm.ceilings(model, batch, defenses=defenses, auxiliary=auxiliary, bounds=["van_trees", "hidden_directions"])
        assert not found.found
        assert word in found.refused["hidden_directions"]


@pytest.mark.parametrize("shift", [50, -50])
def test_auxiliary_labels_of_another_task_are_refused(setting, shift):
    model, batch, auxiliary = setting
    private = (dm.defense("dpsgd", max_norm=1.0, noise_multiplier=1.0),)
    other = dm.Batch(auxiliary.inputs, auxiliary.targets + shift)
    refused = dm.ceilings(model, batch, defenses=private, auxiliary=other, bounds="label_robustness").refused
    assert "expected classes from 0 to 9" in refused["label_robustness"]


def test_the_attacker_among_candidates_stays_below_its_bound(setting):
    model, batch, auxiliary = setting
    found = _values(
        model, batch, (dm.defense("dpsgd", max_norm=0.5, noise_multiplier=1.0),), "reconstruction_robustness", auxiliary=auxiliary
    )
    assert 0.1 < found.details["attack"] < float(found.values[0])
    assert found.details["epsilon"]["prv"] <= found.details["epsilon"]["rdp"]
    from opacus.accountants import RDPAccountant

    counted = RDPAccountant()
    counted.history = [(1.0, 1.0, 1)]
    assert found.details["epsilon"]["rdp"] == pytest.approx(counted.get_epsilon(delta=1e-5), rel=1e-6)
    by_client = (dm.defense("clipping", max_norm=0.5), dm.defense("gaussian_noise", std=1.0))
    whole = _values(model, batch, by_client, "reconstruction_robustness", auxiliary=auxiliary)
    assert whole.details["epsilon"] == found.details["epsilon"]  # any other batch moves twice the norm, and the noise is twice as large
    louder = _values(
        model, batch, (dm.defense("dpsgd", max_norm=0.5, noise_multiplier=50.0),), "reconstruction_robustness", auxiliary=auxiliary
    )
    assert louder.details["attack"] == pytest.approx(0.1, abs=0.03)


def test_a_bound_in_less_time_takes_fewer_draws_or_steps():
    assert VanTrees().within(1e9, 64) == VanTrees()
    assert VanTrees().within(640, 64) == VanTrees(points=10)
    assert VanTrees().within(1e9, 3072).steps == VanTrees().steps
    assert 4 <= VanTrees().within(300, 3072).steps < VanTrees().steps
    for numbers in (64, 3072):
        with pytest.raises(Refused, match="longer than an attack"):
            VanTrees().within(60, numbers)
