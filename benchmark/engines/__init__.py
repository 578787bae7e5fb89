"""Other engines that decode the same weights, each in a process of its own: OpenVINO GenAI, llama.cpp, CTranslate2,
vLLM."""
