"""Inside SGLang: the plugin, the decision, attach and rebuild, donation, the lease."""
