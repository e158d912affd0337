// What the app, pages of results and exported pages have in common.

export const NONE = "none of these";
export const kindOf = (decision) => (decision === NONE ? "none" : decision === "unsure" ? "unsure" : "named");

// A percentage is 100% or 0% only if it is exactly that, as on the command line.
export function percent(p) {
  if (p >= 0.995 && p < 1) return ">99%";
  return p > 0 && p < 0.005 ? "<1%" : Math.round(100 * p) + "%";
}

// Text of strangers, which must not be shown reversed.
export const plain = (text) => String(text).replace(/[\u202a-\u202e\u2066-\u2069]/g, "?");
