"""Generation by servers of vLLM or SGLang over HTTP."""
