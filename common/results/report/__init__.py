"""A sweep as one HTML file that needs nothing else: `python benchmarks.py report`.

`page` says what stands in it, `page.html` where, `style.css` and `dark.css` how it looks, and
`page.js` sorts and filters; without JavaScript all of it can still be read.
"""
