"""How many JSON schemas that people wrote are taken, and whether every answer that ends by itself is valid.

    python benchmarks/bench_schemas.py FOLDER [--quick] [--per-kind 30]

FOLDER holds schemas as JSONSchemaBench's `data` does, a folder for each kind
(https://github.com/guidance-ai/jsonschemabench; its files come from many projects with licences of their own, so none
is kept here). So many of each kind are drawn by the seed. Each is compiled: what is not supported must be refused by a
message that says what it is, in about half a second at most. mneme-tiny then answers under the others, with blanks
made unlikely as it knows no JSON; an answer that has not ended after 200 tokens says nothing.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
from harness import PartResult, Run, at_most, options_of

from mneme import LLM, Grammar, SamplingParams
from mneme.errors import InvalidRequest
from mneme.replicas.text.matcher import Grammars

_MAX_TOKENS = 200
_COMPILE_TARGET_S = 1.0


def drawn(folder: Path, per_kind: int, seed: int) -> dict[str, list[Any]]:
    """Schemas by kind."""
    rng, found = random.Random(seed), {}
    for kind in sorted(each for each in folder.iterdir() if each.is_dir()):
        files = sorted(kind.rglob("*.json"))
        read = [json.loads(file.read_text()) for file in rng.sample(files, min(per_kind, len(files)))]
        found[kind.name] = [each.get("json_schema", each) for each in read if isinstance(each, dict)]
    return found


def reason(error: InvalidRequest) -> str:
    """What is not supported, without what differs from schema to schema."""
    said = str(error).partition("not supported: ")[2] or str(error)
    return re.sub(r"(at|of|for|between) .*|[0-9]+|/.*", "...", said)[:70]


def is_valid(answer: str, schema: Any) -> bool:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        validator(schema).validate(json.loads(answer))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    parser = options_of(__doc__, quick="5 of each kind")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-kind", type=int, default=30)
    args = parser.parse_args()
    run = Run("schemas", args, model="mneme-tiny", max_tokens=_MAX_TOKENS)
    llm = LLM("mneme-tiny", dtype="float32")
    grammars = Grammars(llm.tokenizer)
    blanks = [i for i in range(llm.tokenizer.vocab_size) if not llm.tokenizer.token_text(i).strip()]
    part = PartResult(name="schemas", title="schemas taken, and answers under them")
    refused, slowest_s, num_invalid = Counter[str](), 0.0, 0
    for kind, schemas in drawn(args.folder, 5 if args.quick else args.per_kind, args.seed).items():
        taken = []
        for schema in schemas:
            began_s = time.thread_time()
            try:
                grammar = Grammar("json_schema", schema)
                grammars.check(grammar)
                taken.append((schema, grammar))
            except InvalidRequest as error:
                refused[reason(error)] += 1
            slowest_s = max(slowest_s, time.thread_time() - began_s)
        params = [
            SamplingParams(
                grammar=grammar, max_tokens=_MAX_TOKENS, seed=args.seed, logit_bias=dict.fromkeys(blanks, -100.0)
            )
            for _, grammar in taken
        ]
        answers = [output.outputs[0] for output in llm.generate(["JSON: "] * len(taken), params)] if taken else []
        ended = [
            is_valid(answer.text, schema)
            for answer, (schema, _) in zip(answers, taken, strict=True)
            if answer.finish_reason == "stop"
        ]
        num_invalid += ended.count(False)
        row = {"kind": kind, "schemas": len(schemas), "compiled": len(taken), "refused": len(schemas) - len(taken)}
        part.rows.append({**row, "finished": len(ended), "invalid": ended.count(False)})
    part.checks += [
        at_most("finished answers that are not valid", num_invalid, 0, "answers"),
        at_most("the longest compilation", slowest_s, _COMPILE_TARGET_S, "s of CPU"),
    ]
    run.show(part)
    for said, count in refused.most_common():
        run.say(f"{count:5} {said}")
    run.end(part.rows, refused=dict(refused.most_common()))


if __name__ == "__main__":
    main()
