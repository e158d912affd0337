// The guide first: a page that explains something outranks the changelog and the listings of source code.
"use strict";

var Scorer = {  // `var`: Sphinx looks for a global
  score: ([docname, , , , score]) =>
    /^(changelog$|research-log$|_modules\/)/.test(docname) ? score - 100
      : /^(index$|tutorial$|howto\/|faq$|how-good$|coming-from$)/.test(docname) ? score + 20
        : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 60,
  partialTitle: 20,
  term: 5,
  partialTerm: 2,
};
