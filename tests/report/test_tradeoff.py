import dataclasses

import pytest

from dosimeter.report.cells import cells_of, leaked_share
from dosimeter.report.page import render
from dosimeter.report.tradeoff import advice, front, tradeoff
from dosimeter.surfaces.surface import surface_named
from dosimeter.types import Record

BLANK = Record(
    key="k",
    config={"subject": {}},
    surface="utility",
    method="federated training",
    seed=0,
    threat_model={},
    metrics={},
    nulls={},
    outcome="completed",
    verdict="",
    reason="",
    warnings=[],
    seconds=1.0,
    versions={},
)
NONE, PRUNED, NOISY = [], [{"name": "pruning", "ratio": 0.9}], [{"name": "gaussian_noise", "std": 0.1}]


def cost(defenses, accuracy, kept, **details):
    metrics = {"accuracy": [accuracy], "accuracy_kept": [kept], "bytes_ratio": [0.5], "time_ratio": [1.5], "epsilon": [None]}
    return dataclasses.replace(BLANK, key=f"u{defenses}", threat_model={"defenses": defenses}, metrics=metrics, details=details)


def inputs(defenses, psnr, verdict, method="dlg"):
    nulls = {"mean": {"psnr": [10.0] * len(psnr)}, "foreign": {"psnr": [12.0] * len(psnr)}}
    threat_model = {"defenses": defenses, "labels": "given", "needs": []}
    return dataclasses.replace(
        BLANK,
        key=f"i{defenses}{method}",
        surface="inputs",
        method=method,
        threat_model=threat_model,
        metrics={"psnr": psnr},
        nulls=nulls,
        verdict=verdict,
    )


RECORDS = [
    inputs(NONE, [30.0, 30.0, 30.0, 14.0], "leaked"),
    cost(NONE, 0.9, 1.0),
    inputs(PRUNED, [30.0, 11.0, 11.0, None], "leaked"),
    cost(PRUNED, 0.89, 0.99),
    inputs(NOISY, [11.0] * 4, "not shown at this budget"),
    cost(NOISY, 0.6, 0.667, guarantees=[{"epsilon": 3.0, "delta": 1e-5, "unit": "client", "source": "x"}]),
]


def test_the_leak_is_the_share_beyond_the_nulls():
    cells = cells_of(RECORDS)
    assert [cell.leaks["inputs"] for cell in cells] == [0.75, 0.25, 0.0]
    assert [cell.name for cell in cells] == ["no defense", "pruning (ratio 0.9)", "gaussian_noise (std 0.1)"]
    assert [cell.defended for cell in cells] == [False, True, True]
    assert cells[2].promises == ["ε 3.00 a client"]


def test_the_most_telling_method_counts_and_a_crash_does_not():
    strong, weak = inputs(NONE, [30.0] * 4, "leaked"), inputs(NONE, [11.0] * 4, "not shown at this budget", "sapag")
    assert leaked_share(surface_named("inputs"), [weak, strong]) == 1.0
    assert leaked_share(surface_named("inputs"), [weak]) == 0.0
    assert leaked_share(surface_named("inputs"), [dataclasses.replace(strong, outcome="crashed")]) is None
    assert leaked_share(surface_named("labels"), [strong]) is None


def test_features_count_below_half_of_each_null():
    metrics, nulls = {"feature_error": [0.1, 0.3, None]}, {"mean": {"feature_error": [0.4, 0.4, 0.4]}, "zero": {"feature_error": [1.0] * 3}}
    record = dataclasses.replace(BLANK, surface="features", metrics=metrics, nulls=nulls, verdict="leaked")
    assert leaked_share(surface_named("features"), [record]) == pytest.approx(1 / 3)


def test_the_front_by_brute_force():
    points = [(1.0, 1.0), (0.5, 0.9), (0.5, 0.8), (0.0, 0.5), (0.2, 0.5), (0.0, 0.5), (1.0, 0.2)]
    assert front(points) == [0, 1, 3, 5]
    assert front([]) == []


def test_the_advice_keeps_nine_tenths_of_the_accuracy():
    said = advice(cells_of(RECORDS))
    assert said.startswith("Switch on pruning (ratio 0.9): leaks least, though inputs still leak; 99\u202f% of the accuracy is kept")
    first, second = said.split(". ")
    assert first.endswith("an update takes 0.500 times the bytes, 1.50 times the client’s time, it promises no ε")
    assert second.startswith("Behind gaussian_noise (std 0.1) no leak is shown at all, but there 67\u202f% of the accuracy is kept")
    assert second.endswith("it promises ε 3.00 a client.")
    cheap = [*RECORDS[:5], cost(NOISY, 0.85, 0.94)]
    assert advice(cells_of(cheap)).startswith("Switch on gaussian_noise (std 0.1): no leak of inputs is shown behind it at this budget;")


def test_what_was_not_measured_behind_a_defense_is_not_said_to_be_stopped():
    """The attack crashed behind the noise: nothing is known of the inputs there."""
    found = ((NONE, 0.0, "leaked"), (PRUNED, 0.0, "leaked"), (NOISY, 0.9, "not shown at this budget"))
    features = [
        dataclasses.replace(
            inputs(defenses, [], verdict, "subspace"),
            surface="features",
            metrics={"feature_error": [error]},
            nulls={"mean": {"feature_error": [1.0]}},
        )
        for defenses, error, verdict in found
    ]
    crashed = dataclasses.replace(RECORDS[4], outcome="crashed")
    said = advice(cells_of([*RECORDS[:4], crashed, cost(NOISY, 0.9, 1.0), *features]))
    assert said.startswith("Switch on gaussian_noise (std 0.1): no leak of features is shown behind it at this budget; 100")


def test_the_advice_says_what_luck_leaves_open():
    records = [labels(1.0, 1e-9, seed=seed) for seed in range(3)] + [cost(NONE, 0.9, 1.0)]
    records += [dataclasses.replace(labels(0.75, 0.2, seed=seed), threat_model={"defenses": NOISY}) for seed in range(3)]
    records = [dataclasses.replace(r, threat_model=r.threat_model | {"batch_size": 4}) for r in [*records, cost(NOISY, 0.9, 1.0)]]
    said = advice(cells_of(records))
    assert said.startswith("Switch on gaussian_noise (std 0.1): no leak of labels is shown behind it at this budget (labels: ilrg came ")
    assert "too few to tell from luck); 100" in said


def test_the_advice_says_when_the_training_came_to_nothing():
    def judged(accuracy):
        return advice(cells_of([RECORDS[0], cost(NONE, accuracy, 1.0, guessing=0.1), *RECORDS[2:4]]))

    assert "the training reached an accuracy of 16\u202f% only, guessing gives 10\u202f%" in judged(0.16)
    assert "guessing" not in judged(0.5)


def test_the_advice_says_when_there_is_none():
    useless = [*RECORDS[:2], inputs(PRUNED, [30.0] * 4, "leaked"), cost(PRUNED, 0.9, 1.0)]
    assert advice(cells_of(useless)).startswith("None of these defenses stops a leak")
    costly = [*RECORDS[:2], *RECORDS[4:]]
    assert "keeps 90\u202f% of the undefended accuracy; gaussian_noise (std 0.1) keeps most, 67\u202f%." in advice(cells_of(costly))
    tight = [inputs(NONE, [11.0] * 4, "not shown at this budget"), *RECORDS[1:2], *RECORDS[4:]]
    assert advice(cells_of(tight)).startswith("Nothing leaked without a defense at this budget")
    assert advice(cells_of(RECORDS[:2])).startswith("No defense could be measured here")


def test_the_plane_stands_where_the_numbers_are():
    (plane,) = tradeoff(RECORDS).planes
    at = {point.number: (point.across, point.down, point.front) for point in plane.points}
    assert at == {0: (100.0, 50.0, True), 1: (97.5, 150.0, True), 2: (16.75, 200.0, True)}
    assert plane.segments[0] == (16.75, 200.0, 16.75, 150.0)
    assert [text for _, text in plane.across_ticks] == ["60\u202f%", "70\u202f%", "80\u202f%", "90\u202f%", "100\u202f%"]
    assert tradeoff(RECORDS[::2]) is None


def test_numbers_that_would_overlap_share_a_place():
    near = [inputs(NONE, [30.0] * 4, "leaked"), cost(NONE, 0.9, 1.0)]
    near += [inputs(PRUNED, [30.0, 30.0, 30.0, 11.0], "leaked"), cost(PRUNED, 0.89, 0.99)]
    near += [inputs(NOISY, [30.0, 30.0, 30.0, 11.0], "leaked", "ig"), cost(NOISY, 0.89, 0.99)]
    (plane,) = tradeoff(near).planes
    assert [text for _, _, text in plane.labels] == ["1, 2", "0"]


def test_the_page_shows_it_and_lists_no_cost_as_a_method():
    page = render(RECORDS)
    assert "What to switch on" in page
    assert page.count('class="cell on-front') == 4  # three cells and the key
    assert "federated training" not in page
    assert "What to switch on" not in render(RECORDS[::2])
    with pytest.raises(ValueError, match="got only what the defenses cost"):
        render(RECORDS[1::2])


def labels(found, chance, method="ilrg", seed=0, **details):
    return dataclasses.replace(
        BLANK,
        key=f"l{method}{seed}",
        surface="labels",
        method=method,
        seed=seed,
        config={"subject": {"batch_hash": seed}, "seed": seed, "labels": method},
        threat_model={"defenses": NONE, "batch_size": 4},
        metrics={"insacc": [found]},
        nulls={"prior": {"insacc": [0.5]}},
        verdict="not shown at this budget",
        details={"chance": chance, **details},
    )


def test_the_share_is_the_mean_over_the_batches():
    batches = [inputs(NONE, [30.0] * 4, "leaked"), inputs(NONE, [11.0] * 4, "not shown at this budget")]
    assert leaked_share(surface_named("inputs"), batches) == 0.5


def test_batches_too_small_to_tell_say_so():
    price = dataclasses.replace(cost(NONE, 0.9, 1.0), threat_model={"defenses": NONE, "batch_size": 4})
    (cell,) = cells_of([labels(1.0, 0.2), price])
    assert cell.leaks == {"labels": 0.0}
    assert cell.note == "labels: ilrg came 100\u202f% of the way from guessing to perfect, which 4 samples are too few to tell from luck"
    (cell,) = cells_of([labels(0.5, 0.9), price])
    assert cell.note == ""
