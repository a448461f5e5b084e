"""Report of a sweep as one HTML file that needs no other file: `python benchmarks.py report`.

`page` computes the content, and `page.html` is the template. `style.css` and `dark.css` are its
styles. `page.js` sorts and filters tables; the page is complete without JavaScript, too.
"""
