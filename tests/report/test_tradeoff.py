"""What to switch on: the front of leak and accuracy, the advice in words, and the plane on the page."""

import dataclasses

import pytest

from dosimeter.report.cells import cells_of
from dosimeter.report.page import render
from dosimeter.report.tradeoff import advice, front, tradeoff

NONE, PRUNED, NOISY = [], [{"name": "pruning", "ratio": 0.9}], [{"name": "gaussian_noise", "std": 0.1}]


def test_the_front_by_brute_force():
    points = [(1.0, 1.0), (0.5, 0.9), (0.5, 0.8), (0.0, 0.5), (0.2, 0.5), (0.0, 0.5), (1.0, 0.2)]
    assert front(points) == [0, 1, 3, 5]
    assert front([]) == []


def test_the_advice_keeps_nine_tenths_of_the_accuracy(make_cost, grid_records):
    said = advice(cells_of(grid_records))
    assert said.startswith("Switch on pruning (ratio 0.9): leaks least, though inputs still leak; 99")
    first, second = said.split(". ")
    assert "0.500 times the bytes, 1.50 times the client’s time" in first
    assert first.endswith("promises no ε")
    assert second.startswith("Behind gaussian_noise (std 0.1) no leak is shown")
    assert "67\u202f% of the accuracy" in second
    assert second.endswith("promises ε 3.00 a client.")
    cheap = [*grid_records[:5], make_cost(NOISY, 0.85, 0.94)]
    assert advice(cells_of(cheap)).startswith("Switch on gaussian_noise (std 0.1): no leak of inputs is shown")


def test_what_was_not_measured_behind_a_defense_is_not_said_to_be_stopped(make_inputs, make_cost, grid_records):
    """The attack crashed behind the noise: nothing is known of the inputs there."""
    found = ((NONE, 0.0, "leaked"), (PRUNED, 0.0, "leaked"), (NOISY, 0.9, "not shown at this budget"))
    features = [
        dataclasses.replace(
            make_inputs(defenses, [], verdict, "subspace"),
            surface="features",
            metrics={"feature_error": [error]},
            nulls={"mean": {"feature_error": [1.0]}},
        )
        for defenses, error, verdict in found
    ]
    crashed = dataclasses.replace(grid_records[4], outcome="crashed")
    said = advice(cells_of([*grid_records[:4], crashed, make_cost(NOISY, 0.9, 1.0), *features]))
    assert said.startswith("Switch on gaussian_noise (std 0.1): no leak of features is shown")


def test_the_advice_names_every_surface_that_leaked_somewhere_and_not_behind_the_defense(make_cost, make_labels, make_inputs):
    records = [make_labels(1.0, 1e-9, seed=seed) for seed in range(3)]
    records += [make_cost(NONE, 0.9, 1.0), make_inputs(NONE, [11.0] * 4, "not shown at this budget")]
    records += [make_inputs(PRUNED, [30.0] * 4, "leaked"), make_cost(PRUNED, 0.9, 1.0)]
    quiet = [dataclasses.replace(make_labels(0.0, 1.0, seed=seed), threat_model={"defenses": NOISY}) for seed in range(3)]
    records += [*quiet, make_inputs(NOISY, [11.0] * 4, "not shown at this budget"), make_cost(NOISY, 0.9, 1.0)]
    records = [dataclasses.replace(r, threat_model=r.threat_model | {"batch_size": 4}) for r in records]
    assert advice(cells_of(records)).startswith("Switch on gaussian_noise (std 0.1): no leak of labels and inputs is shown")


@pytest.mark.parametrize(("epsilon", "said"), [(3.0, "ε 3.00 a client"), (989.0, "ε 989 a client, too large to protect by itself")])
def test_a_large_epsilon_is_said_to_protect_nothing(make_cost, grid_records, epsilon, said):
    guarantee = {"epsilon": epsilon, "delta": 1e-5, "unit": "client", "source": "x"}
    cells = cells_of([*grid_records[:2], make_cost(NOISY, 0.85, 0.94, guarantees=[guarantee])])
    assert cells[-1].promises == [said]


def test_the_advice_says_what_luck_leaves_open(make_cost, make_labels):
    records = [make_labels(1.0, 1e-9, seed=seed) for seed in range(3)] + [make_cost(NONE, 0.9, 1.0)]
    records += [dataclasses.replace(make_labels(0.75, 0.2, seed=seed), threat_model={"defenses": NOISY}) for seed in range(3)]
    records = [dataclasses.replace(r, threat_model=r.threat_model | {"batch_size": 4}) for r in [*records, make_cost(NOISY, 0.9, 1.0)]]
    said = advice(cells_of(records))
    assert said.startswith("Switch on gaussian_noise (std 0.1): no leak of labels is shown")
    assert "too few to tell from luck" in said


def test_the_advice_says_when_the_training_came_to_nothing(make_cost, grid_records):
    def judged(accuracy):
        return advice(cells_of([grid_records[0], make_cost(NONE, accuracy, 1.0, guessing=0.1), *grid_records[2:4]]))

    assert "an accuracy of 16\u202f% only, guessing gives 10\u202f%" in judged(0.16)
    assert "guessing" not in judged(0.5)


def test_the_advice_says_when_there_is_none(make_inputs, make_cost, grid_records):
    useless = [*grid_records[:2], make_inputs(PRUNED, [30.0] * 4, "leaked"), make_cost(PRUNED, 0.9, 1.0)]
    assert advice(cells_of(useless)).startswith("None of these defenses stops a leak")
    costly = [*grid_records[:2], *grid_records[4:]]
    assert "gaussian_noise (std 0.1) keeps most, 67\u202f%" in advice(cells_of(costly))
    tight = [make_inputs(NONE, [11.0] * 4, "not shown at this budget"), *grid_records[1:2], *grid_records[4:]]
    assert advice(cells_of(tight)).startswith("Nothing leaked without a defense at this budget")
    assert advice(cells_of(grid_records[:2])).startswith("No defense could be measured here")


def test_the_plane_stands_where_the_numbers_are(grid_records):
    (plane,) = tradeoff(grid_records).planes
    at = {point.number: (point.across, point.down, point.front) for point in plane.points}
    assert at == {0: (100.0, 50.0, True), 1: (97.5, 150.0, True), 2: (16.75, 200.0, True)}
    assert plane.segments[0] == (16.75, 200.0, 16.75, 150.0)
    assert [text for _, text in plane.across_ticks] == ["60\u202f%", "70\u202f%", "80\u202f%", "90\u202f%", "100\u202f%"]
    assert tradeoff(grid_records[::2]) is None


def test_numbers_that_would_overlap_share_a_place(make_inputs, make_cost):
    near = [make_inputs(NONE, [30.0] * 4, "leaked"), make_cost(NONE, 0.9, 1.0)]
    near += [make_inputs(PRUNED, [30.0, 30.0, 30.0, 11.0], "leaked"), make_cost(PRUNED, 0.89, 0.99)]
    near += [make_inputs(NOISY, [30.0, 30.0, 30.0, 11.0], "leaked", "ig"), make_cost(NOISY, 0.89, 0.99)]
    (plane,) = tradeoff(near).planes
    assert [text for _, _, text in plane.labels] == ["1, 2", "0"]


def test_the_page_shows_it_and_lists_no_cost_as_a_method(grid_records):
    page = render(grid_records)
    assert "Every defense that was tried" in page
    assert page.count('class="cell on-front') == 4  # three cells and the key
    assert "federated training" not in page
    assert "Inputs leaked</th>" in page
    assert "Tokens leaked</th>" not in page, "no record looks at tokens"
    assert page.index('class="finding leaked') < page.index('class="finding not-measured')
    assert "Every defense that was tried" not in render(grid_records[::2])
    with pytest.raises(ValueError, match="got only what the defenses cost"):
        render(grid_records[1::2])


def test_the_advice_names_the_cheapest_defense_whose_ceiling_is_below_the_limit(grid_records):
    def limited(limit, tops):
        held = {str(NONE): 200.0, str(PRUNED): None, str(NOISY): tops}
        records = []
        for one in grid_records:
            top = held[str(one.threat_model["defenses"])]
            count = len(one.metrics.get("psnr", []))
            details = {"ceiling": {"psnr": [top] * count, "bounds": {"psnr": {"bound": "van_trees"}}}} if count and top else {}
            details |= {"largest_ceiling": limit} if one.surface == "utility" else {}
            records.append(dataclasses.replace(one, details=one.details | details))
        return records

    said = advice(cells_of(limited(20.0, 15.0)))
    assert "To keep every attacker on the inputs below 20.0\u202fdB, the cheapest is gaussian_noise (std 0.1)" in said
    assert "the ceiling is 15.0\u202fdB (van_trees, an estimate)" in said
    assert "the lowest ceiling is 15.0\u202fdB, behind gaussian_noise" in advice(cells_of(limited(12.0, 15.0)))
    assert "ceiling" not in advice(cells_of(grid_records))
    page = render(limited(20.0, 15.0))
    assert "none known" in page
    assert "≥60\u202fdB" in page
