"""What tyro says of bad arguments, in a line of our own."""


def one_line(boxed: str) -> str:
    """What tyro's box says, without the box, its title and its pointers to the help."""
    paragraphs = [""]
    for line in boxed.splitlines()[1:]:
        text = line.strip("│|╭╮╰╯+ ")
        if text.startswith(("For full helptext", "Argument helptext")):
            break
        if text and not text.strip("─-"):
            paragraphs.append("")
        else:
            paragraphs[-1] += f" {text}"
    said = [" ".join(paragraph.split()).rstrip(".") for paragraph in paragraphs]
    return "; ".join(filter(None, said)) or "the arguments could not be read"
