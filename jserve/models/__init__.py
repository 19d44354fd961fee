"""Model families as pytrees and functions: `config` says what a model is, `spec` its parameters, `llama` runs it.

Models never see a request or a sequence: they get flat tokens, positions, pools and a step's geometry.
"""
