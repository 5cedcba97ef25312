"""The other side of step.py: transformers 4.35.2's REALM, in its own environment, told what to do by lines.

    python3 -m venv runs/peer
    runs/peer/bin/pip install transformers==4.35.2 torch 'numpy<2' safetensors
    python benchmarks/step.py --peer runs/peer/bin/python

It makes models with random weights in FOLDER, waits for a line, reads FOLDER/batch.safetensors, and takes one training
step per further line: forward, backward, AdamW. Each is answered by a line of JSON. Shape suffixes as in step.py.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file

try:
    from transformers import RealmConfig, RealmKnowledgeAugEncoder, RealmScorer, logging
except ImportError:
    raise SystemExit("this transformers has no REALM; run the script as its first lines say") from None


def main() -> None:
    folder, precision, shape = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = RealmConfig(**shape)
    scorer, encoder = RealmScorer(config).train(), RealmKnowledgeAugEncoder(config).train()
    scorer.save_pretrained(folder / "scorer", safe_serialization=True)
    encoder.save_pretrained(folder / "encoder", safe_serialization=True)
    print(json.dumps({"torch": torch.__version__}), flush=True)
    sys.stdin.readline()
    batch = load_file(folder / "batch.safetensors")
    parameters = list({id(p): p for module in (scorer, encoder) for p in module.parameters()}.values())
    optimiser = torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.01)
    for _ in sys.stdin:
        start = time.process_time()
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            relevance_BK = scorer(
                input_ids=batch["query_BL"],
                attention_mask=batch["query_BL"].ne(0).long(),
                candidate_input_ids=batch["document_BKL"],
                candidate_attention_mask=batch["document_BKL"].ne(0).long(),
                candidate_token_type_ids=batch["document_segment_BKL"],
            ).relevance_score
            loss = encoder(
                input_ids=batch["joined_BKL"],
                attention_mask=batch["joined_BKL"].ne(0).long(),
                token_type_ids=batch["joined_segment_BKL"],
                relevance_score=relevance_BK,
                labels=batch["label_BL"],
                mlm_mask=batch["label_BL"].ne(0).long(),
            ).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        seconds = time.process_time() - start
        mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"loss": loss.item(), "seconds": seconds, "mib": mib}), flush=True)


if __name__ == "__main__":
    main()
