"""Token ids of the texts that are continued or read: those given by flag, or the first of each corpus."""

from inputs.hub import one_line
from inputs.texts import read
from utils import UserError

CHARACTERS = 16  # of text kept for each token of a prompt: far more than any text needs


def check_passages(corpora, args):
    """Raise UserError where no text is long enough."""
    if not any(corpus.passages(args.sentenceLimit) for corpus in corpora):
        raise UserError(f"no text of {args.dataset} has {args.sentenceLimit} characters; lower --sentenceLimit")


def read_prompts(args):
    """The texts given by flag to be continued."""
    if args.prompt is not None:
        return [args.prompt]
    if args.question is not None:
        return [args.question]
    lines = [line for line in read(args.promptFile).split("\n") if line.strip()]
    if not lines:
        raise UserError(f"--promptFile {args.promptFile} holds no prompt; write one on each line")
    return lines


def encode(texts, tokenizer, args):
    """Token ids of texts that are continued from their end; a question in the form its chat model was trained on."""
    if args.question is None:
        return [tokenizer(text, verbose=False)["input_ids"] for text in texts]
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {args.target} has no chat template; give the question with --prompt, or "
            "name an instruct model"
        )
    try:
        return [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for text in texts
        ]
    except Exception as error:  # a template is a program, and may do anything but what its sandbox forbids
        raise UserError(
            f"the chat template of {args.target} fails ({one_line(error)}); give the question with --prompt"
        ) from None


def choose_prompts(args, tokenizer, corpora, given, context):
    """Token ids of the prompts, {length: prompts}: those given, or for each `promptLen` the text from the first
    passages of each corpus in turn on, cut to that length (or to `context`, which is refused where it is looked at: a
    book is not tokenized from each of its paragraphs on). Where too few go on for so long, the longest others."""
    if given:
        prompts = encode(given, tokenizer, args)
        return {max(map(len, prompts)): prompts}
    prompts = {}
    for length in sorted({min(length, context) for length in args.promptLen}):
        passages = [corpus.passages(args.sentenceLimit, CHARACTERS * length) for corpus in corpora]
        in_turn = [p[i] for i in range(max(map(len, passages))) for p in passages if i < len(p)]
        whole, shorter = [], []
        for text in in_turn:
            ids = tokenizer(text, verbose=False)["input_ids"][:length]
            (whole if len(ids) == length else shorter).append(ids)
            if len(whole) == args.sentences:
                break
        prompts[length] = (whole + sorted(shorter, key=len, reverse=True))[: args.sentences]
    return prompts


def tokenize(passages, tokenizer, context):
    """Token ids of each passage, cut to `context` tokens."""
    return [ids[:context] for ids in (tokenizer(text, verbose=False)["input_ids"] for text in passages) if len(ids) > 1]
