"""How far apart what two vLLM said of the same text lies."""


def gap(one, other):
    """Distances of log-probabilities of the same token after the same text.

    ``prompt``: of all tokens of the prompts. ``token``: of the answers, up to and with the place where they part; there
    the token that ``one`` chose, if ``other`` told what it thought of it.
    """
    prompts = [
        a - b
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x["prompt_logprobs"], y["prompt_logprobs"], strict=True)
    ]
    answers, parted = [], 0
    for x, y in zip(one, other, strict=True):
        for a, b, p, alternatives in zip(x["tokens"], y["tokens"], x["logprobs"], y["alternatives"], strict=True):
            if str(a) in alternatives:
                answers.append(p - alternatives[str(a)])
            if a != b:
                parted += 1
                break
    return spread("prompt", prompts) | spread("token", answers) | {"parted": parted}


def spread(name, distances):
    """Root mean square, the largest but one in a thousand, the largest, and of how many."""
    sizes = sorted(map(abs, distances))
    return {
        f"{name}_rms": (sum(size * size for size in sizes) / len(sizes)) ** 0.5,
        f"{name}_p999": sizes[-1 - len(sizes) // 1000],
        f"{name}_max": sizes[-1],
        f"{name}_count": len(sizes),
    }
