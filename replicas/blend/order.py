"""Puts documents in an order whose beginning is known already, so that it is found as an exact prefix.

What ContextPilot (MLSys'26) calls context alignment: nothing of the KV is approximate.
"""

from __future__ import annotations

from mneme.replicas.blend.asked import AskedBeginnings
from mneme.replicas.forest.forest import PrefixForest, follow
from mneme.replicas.request import GenerationRequest

_MAX_PLACES = 64  # that are tried: each compares all documents that are left


def best_order(request: GenerationRequest, forest: PrefixForest, asked: AskedBeginnings) -> list[int]:
    """Return the order of a request's documents by their indices: as given, unless it leaves that to the server.

    Place by place it takes the document that the forest follows furthest, as long as it follows all before it. Behind
    these it takes what was asked for there: that may have been reused in place, and is computed exactly now. Only
    documents of one message change places. The rest, and what is equally far, stays in the order that was given.
    """
    spans, ids = request.documents, request.prompt_token_ids
    order = list(range(len(spans)))
    salt, root = request.salt, forest.roots.get(request.salt)
    if not any(map(request.blend.may_move, spans)) or request.append or root is None:
        return order
    known = list(ids[: spans[0].start])
    page, position = follow(root, root.start, known, salt)
    num_known = 0  # documents that the forest follows, as they stand in `order`
    for place in range(min(len(order), _MAX_PLACES)):
        if position < len(known):
            break
        best = page, position, place
        for candidate in range(place, len(order)):
            span = spans[order[candidate]]
            if span.group != spans[place].group or (candidate > place and not request.blend.may_move(span)):
                break
            known[position:] = ids[span.start : span.end]
            found = follow(page, position, known, salt)
            if found[1] > best[1]:
                best = *found, candidate
        if best[1] == position:
            break
        num_known += 1
        order.insert(place, order.pop(best[2]))
        span, end = spans[order[place]], spans[place + 1].start if place + 1 < len(spans) else len(ids)
        known[position:] = (*ids[span.start : span.end], *ids[spans[place].end : end])
        page, position = follow(best[0], best[1], known, salt)
    asked.go_on(salt, ids, spans, order, num_known, max_places=_MAX_PLACES, may_move=request.blend.may_move)
    return order
