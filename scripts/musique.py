#!/usr/bin/env python3
"""Writes MuSiQue's questions with their paragraphs as a corpus: musique.py MUSIQUE.json DIRECTORY.

The file is a list of {"question", "answers", "ctxs": [{"title", "text"}]}. Every different paragraph
becomes DIRECTORY/documents/doc_N.txt, numbered as they first appear; questions and first answers
become DIRECTORY/questions/query.jsonl and DIRECTORY/answers/answer.jsonl.
"""

import json
import pathlib
import sys


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    entries = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = pathlib.Path(sys.argv[2])
    for name in ("documents", "questions", "answers"):
        (out / name).mkdir(parents=True, exist_ok=True)
    seen = set()
    for entry in entries:
        for context in entry["ctxs"]:
            text = "\n".join(filter(None, (context["title"], context["text"])))
            if text not in seen:
                (out / "documents" / f"doc_{len(seen)}.txt").write_text(text, encoding="utf-8")
                seen.add(text)
    for name, file, value in (
        ("query", "questions/query.jsonl", lambda e: e["question"]),
        ("answer", "answers/answer.jsonl", lambda e: e["answers"][0]),
    ):
        lines = (json.dumps({"id": i, name: value(e)}) for i, e in enumerate(entries))
        (out / file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
