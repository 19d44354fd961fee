"""Generated from proto/jserve/v1 by tools/gen_protos.py; not edited by hand."""
