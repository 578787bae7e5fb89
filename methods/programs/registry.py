"""The programs whose methods the catalogue has beside this project's. To add one, write a class and name it here."""

from methods.programs.cTranslate import CTranslate
from methods.programs.llamaCpp import LlamaCpp
from methods.programs.openvinoGenai import OpenVino
from methods.programs.program import Program, Row
from methods.programs.vllmCpu import Vllm


class Generate(Program):
    """`generate` of transformers. It runs in this process (`benchmark.others.LibraryMethod`)."""

    name = "generate"
    rows = {
        "plain": Row("generate of transformers"),
        "static": Row("the same with a static KV cache"),
        "compiled": Row("the same, compiled by transformers"),
        "lookup": Row("its prompt lookup", "lookup"),
        "draft": Row("its assisted decoding with gamma guesses each round", "draft"),
        "assisted": Row("its assisted decoding as it comes", "draft"),
        "universal": Row("its assisted decoding for any tokenizer", "draft"),
        "custom": Row("this project's speculative sampling inside generate", "draft"),
    }


PROGRAMS = {program.name: program for program in (Generate, LlamaCpp, OpenVino, CTranslate, Vllm)}
