def check_supported(config): pass
def text_config(config): return config.get_text_config(decoder=True)
