"""The LM head's product, one module per way to compute it. They do not import each other; `resolve` picks one."""
