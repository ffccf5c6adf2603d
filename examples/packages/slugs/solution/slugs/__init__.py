import re
import unicodedata


def slugify(text, separator="-", max_length=None):
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    slug = separator.join(re.findall(r"[a-z0-9]+", plain))
    if max_length is not None:
        slug = slug[:max_length]
        while separator and slug.endswith(separator):
            slug = slug[: -len(separator)]
    return slug


def unique(slugs):
    seen, result = {}, []
    for slug in slugs:
        seen[slug] = seen.get(slug, 0) + 1
        result.append(slug if seen[slug] == 1 else f"{slug}-{seen[slug]}")
    return result
