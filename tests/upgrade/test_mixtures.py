from tests.upgrade import mixtures
from tests.upgrade.mixtures import GROUPS, STEPS, Step


def step(mixture: dict[str, str], **verdicts: dict[str, str]) -> Step:
    return Step(dict(mixture), 500, 0, 0, [], verdicts)


def test_the_steps_lead_through_each_pair_of_one_group_and_the_others_and_back() -> None:
    mixture, names = dict.fromkeys(GROUPS, "old"), []
    for group, version in STEPS:
        assert mixture[group] != version
        mixture[group] = version
        names.append(step(mixture).name)
    assert set(names) == {"", *(f"{version} {group}s" for version in ("old", "new") for group in GROUPS)}
    assert set(mixture.values()) == {"old"}


def test_only_rules_that_hold_for_the_old_version_alone_must_hold_in_mixtures() -> None:
    alone, mixed = dict.fromkeys(GROUPS, "old"), {"worker": "new", "router": "old", "gateway": "old"}
    before = step(alone, new={"a rule": "ok", "a feature": "broken it is not there"})
    after = step(mixed, new={"a rule": "broken no answer", "a feature": "broken it is not there", "other": "broken"})
    (found,) = mixtures.newly_broken([before, after])
    assert found.startswith("new's rule: a rule: broken no answer")
