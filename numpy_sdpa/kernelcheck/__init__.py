"""Is a kernel right, and if not, which mistake is it?"""
