"""`python -m bench.tool_calls`: prints how many recorded outputs are read correctly, by family, and every miss."""

from __future__ import annotations

from collections import Counter

from canitoolcall.results import Status

from bench.tool_calls.score import MODES, RECORDED, cases, check

PUBLIC = {
    "vLLM": (268, 469),
    "SGLang": (189, 448),
    "llama.cpp": (278, 438),
    "Ollama": (224, 261),
    "transformers": (33, 48),
}
"""The suite's published results: how many outputs each system reads correctly, of those it has a parser for."""


def main() -> None:
    every = cases()
    of_family = Counter(fixture.family for fixture, _ in every)
    right = {mode: Counter[str]() for mode in MODES}
    for fixture, family in every:
        for mode, hold_calls in MODES.items():
            status, failed = check(fixture, family, hold_calls=hold_calls)
            if status is Status.PASS:
                right[mode][fixture.family] += 1
            else:
                reason = RECORDED[mode].misses.get(fixture.id, "not known")
                print(f"{mode} {fixture.id}: {failed[0].detail}\n  {reason}")
    print("\n| family | outputs | calls held until they are complete | calls as they come |\n|---|---|---|---|")
    for family_name in sorted(of_family):
        print(f"| {family_name} | {of_family[family_name]} |", *(f"{right[mode][family_name]} |" for mode in MODES))
    print(f"| all | {len(every)} |", *(f"{right[mode].total()} |" for mode in MODES))
    print("\nPublished:", ", ".join(f"{name} {passed} of {tried}" for name, (passed, tried) in PUBLIC.items()))


if __name__ == "__main__":
    main()
