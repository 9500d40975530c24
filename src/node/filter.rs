//! Which tools are lent, by patterns of their names: `*` stands for any characters, `?` for one.

/// What is let through.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Only these; all, if there are none.
    pub include: Vec<String>,
    /// Not these.
    pub exclude: Vec<String>,
}

impl Filter {
    /// Whether a tool of this name is lent.
    pub fn takes(&self, name: &str) -> bool {
        let is_in = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, name));
        (self.include.is_empty() || is_in(&self.include)) && !is_in(&self.exclude)
    }
}

/// Whether `pattern` stands for the whole of `name`. When something does not fit, the last `*` takes one character
/// more.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    let mut star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&c) if c == '?' || c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => {
                let Some((at, taken)) = star else { return false };
                star = Some((at, taken + 1));
                p = at + 1;
                n = taken + 1;
            }
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_stand_for_whole_names() {
        for (pattern, name) in
            [("a", "a"), ("*", ""), ("a*c", "abbc"), ("a*c", "acbc"), ("?b", "ab"), ("app.*", "app.x"), ("*é?", "xéy")]
        {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("a", "ab"), ("a", ""), ("a*c", "acb"), ("?", ""), ("app.*", "apple"), ("", "a")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
        let hostile = "*a".repeat(20) + "b";
        assert!(!matches(&hostile, &"a".repeat(100)));
    }

    #[test]
    fn what_is_excluded_is_not_lent_even_if_it_is_included() {
        let patterns = |list: &[&str]| list.iter().map(|&pattern| pattern.to_owned()).collect();
        let filter =
            |include: &[&str], exclude: &[&str]| Filter { include: patterns(include), exclude: patterns(exclude) };
        assert!(filter(&[], &[]).takes("x"));
        assert!(filter(&["x*"], &["xy"]).takes("xx"));
        assert!(!filter(&["x*"], &["xy"]).takes("xy"));
        assert!(!filter(&["x*"], &[]).takes("y"));
    }
}
