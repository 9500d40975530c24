//! Whether a command is listed.
//!
//! A pattern for a program is a glob for its whole path, in which `\` and `/` are the same and letter case does not
//! count: `?` is one character, `*` any within a folder's or file's name, `**` any number of folders. A pattern for
//! arguments is a regular expression or a digest; one that is not understood matches nothing.

use std::fmt::Write as _;

use regex::{Regex, RegexBuilder};
use sha2::{Digest, Sha256};

use super::executable::{Executable, Kind, kind};
use super::policy::Entry;

/// The beginning of a digest of arguments.
const DIGEST: &str = "sha256:argv:";
/// The beginning of every digest. Other kinds are not known here.
const ANY_DIGEST: &str = "sha256:";
/// How big a compiled pattern may be.
const MAX_COMPILED_BYTES: usize = 1024 * 1024;

/// The entry that lists a command. One that says what its arguments must be counts before one that does not.
pub fn find<'a>(allowlist: &'a [Entry], executable: &Executable) -> Option<&'a Entry> {
    let kind = kind(&executable.path).max(kind(&executable.called));
    if kind == Kind::Shell || executable.args.iter().any(|argument| argument.contains('\0')) {
        return None;
    }
    let (path, called) = (executable.path.to_string_lossy(), executable.called.to_string_lossy());
    // A link within a folder that a glob lists could lead anywhere; the owner who names one program knows its links.
    let is_meant = |pattern: &str| {
        path_matches(pattern, &path) || (!pattern.contains(['*', '?']) && path_matches(pattern, &called))
    };
    let mut for_the_path = None;
    for entry in allowlist.iter().filter(|entry| is_meant(&entry.pattern)) {
        match entry.arg_pattern() {
            Some(pattern) if args_match(pattern, &executable.args) => return Some(entry),
            // A program that makes entries binds them to arguments; without, it has lost them.
            None if !entry.is_generated() && kind == Kind::Program => _ = for_the_path.get_or_insert(entry),
            _ => {}
        }
    }
    for_the_path
}

/// What is wrong with a pattern for a path, if anything is.
pub fn pattern_problem(pattern: &str) -> Option<&'static str> {
    let segments: Vec<&str> = pattern.trim().split(['/', '\\']).collect();
    if segments.len() < 2 {
        return Some("it names no folder");
    }
    if segments.iter().any(|segment| segment.contains("**") && *segment != "**") {
        return Some("'**' must stand alone between two slashes");
    }
    None
}

/// Whether a path is meant by a pattern.
pub fn path_matches(pattern: &str, path: &str) -> bool {
    let simple = |text: &str| text.trim().replace('\\', "/").to_lowercase();
    let (pattern_text, path) = (simple(pattern), path.replace('\\', "/").to_lowercase());
    if pattern_problem(&pattern_text).is_some() {
        return false;
    }
    let path: Vec<Vec<char>> = path.split('/').map(|segment| segment.chars().collect()).collect();
    // Which beginnings of the path what has been read of the pattern matches, by their number of segments.
    let mut matched = vec![false; path.len() + 1];
    matched[0] = true;
    for segment in pattern_text.split('/') {
        let mut next = vec![false; path.len() + 1];
        if segment == "**" {
            let first = matched.iter().position(|is_matched| *is_matched).unwrap_or(next.len());
            next[first..].fill(true);
        } else {
            let segment: Vec<char> = segment.chars().collect();
            for (at, name) in path.iter().enumerate() {
                next[at + 1] = matched[at] && name_matches(&segment, name);
            }
        }
        matched = next;
    }
    matched[path.len()]
}

/// Whether a name is meant by a pattern with `*` and `?`.
fn name_matches(pattern: &[char], name: &[char]) -> bool {
    let (mut at, mut from) = (0, 0);
    // After the last star, and where in the name what follows it was tried.
    let mut star: Option<(usize, usize)> = None;
    while from < name.len() {
        match pattern.get(at) {
            Some('*') => {
                at += 1;
                star = Some((at, from));
            }
            Some(c) if *c == '?' || *c == name[from] => (at, from) = (at + 1, from + 1),
            _ => {
                let Some((after, tried)) = star else { return false };
                (at, from) = (after, tried + 1);
                star = Some((after, from));
            }
        }
    }
    pattern[at..].iter().all(|c| *c == '*')
}

/// Whether arguments are as a pattern wants them.
fn args_match(pattern: &str, args: &[String]) -> bool {
    if pattern.starts_with(ANY_DIGEST) {
        return pattern == digest(args);
    }
    let Ok(regex) = compile(pattern) else { return false };
    // A pattern that holds the separator knows where each argument ends.
    let text = if pattern.contains('\0') { separated(args) } else { args.join(" ") };
    // On Windows both separators mean the same folder, and programs write the one that they like.
    regex.is_match(&text) || (cfg!(windows) && regex.is_match(&text.replace('/', "\\")))
}

/// What an entry wants of arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arguments<'a> {
    /// Nothing.
    Any,
    /// It lists nothing.
    None,
    /// To be those of a digest.
    Digest,
    /// To be these.
    Exactly(Vec<String>),
    /// To match an expression.
    Like(&'a str),
}

/// What an entry wants of arguments, for people to read.
pub fn arguments(entry: &Entry) -> Arguments<'_> {
    match entry.arg_pattern() {
        None if entry.is_generated() => Arguments::None,
        None => Arguments::Any,
        Some(pattern) if pattern.starts_with(DIGEST) => Arguments::Digest,
        Some(pattern) if pattern.starts_with(ANY_DIGEST) => Arguments::None,
        Some(pattern) => inexact(pattern).map_or(Arguments::Like(pattern), Arguments::Exactly),
    }
}

/// The arguments of which a pattern is the exact one.
fn inexact(pattern: &str) -> Option<Vec<String>> {
    let inner = pattern.strip_prefix('^')?.strip_suffix("\0$")?;
    let mut literal = String::new();
    let mut chars = inner.chars();
    while let Some(c) = chars.next() {
        literal.push(if c == '\\' { chars.next()? } else { c });
    }
    let args: Vec<String> = if literal == "\0" { Vec::new() } else { literal.split('\0').map(str::to_owned).collect() };
    // Whatever has been misunderstood gives another pattern.
    (exact(&args) == pattern).then_some(args)
}

/// Reads a regular expression.
///
/// # Errors
/// What is wrong with it.
pub fn compile(pattern: &str) -> Result<Regex, regex::Error> {
    RegexBuilder::new(pattern).size_limit(MAX_COMPILED_BYTES).build()
}

/// The pattern for exactly these arguments.
pub fn exact(args: &[String]) -> String {
    if args.is_empty() {
        return "^\0\0$".to_owned();
    }
    args.iter().fold("^".to_owned(), |text, argument| text + &regex::escape(argument) + "\0") + "$"
}

fn separated(args: &[String]) -> String {
    match args {
        [] => "\0\0".to_owned(),
        args => args.iter().fold(String::new(), |text, argument| text + argument + "\0"),
    }
}

/// The digest of arguments: of their number and of each with its length before it.
fn digest(args: &[String]) -> String {
    let mut text = format!("{}\0", args.len());
    for argument in args {
        // Writing to a string does not fail.
        let _infallible = write!(text, "{}\0{argument}\0", argument.len());
    }
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().fold(DIGEST.to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn args(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    fn executable(path: &str, words: &[&str]) -> Executable {
        Executable { path: PathBuf::from(path), called: PathBuf::from(path), args: args(words) }
    }

    fn entry(pattern: &str, arg_pattern: Option<&str>) -> Entry {
        Entry { pattern: pattern.to_owned(), arg_pattern: arg_pattern.map(str::to_owned), ..Entry::default() }
    }

    #[test]
    fn globs_are_for_whole_paths() {
        for (pattern, path, expected) in [
            ("/usr/bin/git", "/usr/bin/git", true),
            (" /usr/bin/git ", "/usr/bin/git", true),
            ("/usr/bin/GIT", "/Usr/bin/git", true),
            (r"C:\Tools\git.exe", "c:/tools/GIT.exe", true),
            ("c:/tools/git.exe", r"C:\Tools\git.exe", true),
            ("/usr/bin/git", "/usr/bin/git2", false),
            ("/usr/bin/git", "/x/usr/bin/git", false),
            ("/usr/bin/g?t", "/usr/bin/git", true),
            ("/usr/bin?git", "/usr/bin/git", false),
            ("/usr/bin/?", "/usr/bin/", false),
            ("/usr/*/git", "/usr/bin/git", true),
            ("/usr/*/git", "/usr/local/bin/git", false),
            ("/usr/*", "/usr/bin/git", false),
            ("/usr/bin/*", "/usr/bin/git", true),
            ("/usr/bin/g*t*", "/usr/bin/gitt", true),
            ("/usr/bin/*.*", "/usr/bin/git", false),
            ("/usr/**/git", "/usr/git", true),
            ("/usr/**/git", "/usr/local/bin/git", true),
            ("/usr/**/git", "/usr/local/bin/xgit", false),
            ("/usr/**", "/usr/local/bin/git", true),
            ("**/git", "/usr/bin/git", true),
            ("**/git", "C:/git", true),
            ("**/b/**/c", "/a/b/c", true),
            ("**/b/**/c", "/a/b/x/y/c", true),
            ("**/b/**/c", "/a/bc", false),
            ("/usr/b**", "/usr/bin", false),
            ("/usr/***/git", "/usr/bin/git", false),
            ("git", "git", false),
            ("*", "/usr/bin/git", false),
            ("**", "/usr/bin/git", false),
            ("*.*", "/a.b", false),
            ("", "", false),
            ("/usr/bin/[g]it", "/usr/bin/git", false),
            ("/usr/bin/g.t", "/usr/bin/git", false),
            ("/ÄÖ/x", "/äö/X", true),
        ] {
            assert_eq!(path_matches(pattern, path), expected, "{pattern} {path}");
        }
        let (pattern, path) = (format!("/{}b", "*a".repeat(200)), format!("/{}", "a".repeat(4000)));
        assert!(!path_matches(&pattern, &path), "and that soon");
    }

    #[test]
    fn patterns_for_arguments_are_bound_to_them() {
        for (pattern, words, expected) in [
            ("^status$", &["status"][..], true),
            ("^status$", &["status", "-s"], false),
            ("^log .*$", &["log", "-1"], true),
            ("stat", &["status"], true),
            ("^$", &[], true),
            ("(", &["("], false),
            (r"(?=a)a", &["a"], false),
            (r"a{1000}{1000}{10}", &["a"], false),
            ("^\0\0$", &[], true),
            ("^\0\0$", &[""], false),
            ("^\0$", &[""], true),
            ("^a b\0$", &["a b"], true),
            ("^a b\0$", &["a", "b"], false),
            ("^a\0b\0$", &["a", "b"], true),
            ("^a\0b\0$", &["a", "b", "c"], false),
        ] {
            assert_eq!(args_match(pattern, &args(words)), expected, "{pattern:?} {words:?}");
        }
        for words in [&[][..], &[""], &["a b", "c"], &["a.b*", "^", "\\"], &["ä\n"]] {
            let exact = exact(&args(words));
            assert!(args_match(&exact, &args(words)), "{exact:?}");
            assert!(!args_match(&exact, &args(&[words, &["x"]].concat())), "{exact:?}");
            assert_eq!(arguments(&entry("/x", Some(&exact))), Arguments::Exactly(args(words)));
        }
        assert!(!args_match(&exact(&args(&["a.b"])), &args(&["axb"])));
    }

    #[test]
    fn what_an_entry_wants_can_be_told() {
        assert_eq!(arguments(&entry("/x", None)), Arguments::Any);
        let generated = Entry { source: Some("allow-always".to_owned()), ..entry("/x", Some("")) };
        assert_eq!(arguments(&generated), Arguments::None);
        assert_eq!(arguments(&entry("/x", Some("sha256:argv:00"))), Arguments::Digest);
        assert_eq!(arguments(&entry("/x", Some("sha256:other:00"))), Arguments::None);
        for like in ["^a$", "a\0", "^.\0$", "^\\d\0$", "^a|b\0$"] {
            assert_eq!(arguments(&entry("/x", Some(like))), Arguments::Like(like));
        }
    }

    #[test]
    fn digests_are_for_exactly_their_arguments() {
        // Of "2\0" "1\0a\0" "3\0b c\0".
        let known = "sha256:argv:e7486d5c9f4db6ab29814259e5a8914ed83fc2090c385d8b70cf5b28c9388345";
        let of = digest(&args(&["a", "b c"]));
        assert_eq!(of, known);
        assert!(args_match(&of, &args(&["a", "b c"])));
        for words in [&["a b", "c"][..], &["a", "b", "c"], &[]] {
            assert!(!args_match(&of, &args(words)), "{words:?}");
        }
        // A digest of another kind is no regular expression.
        let other = "sha256:cwd-argv:v1:00";
        assert!(!args_match(other, &args(&[other])));
    }

    #[test]
    fn an_entry_that_binds_arguments_counts_first() {
        let list = [entry("/x/jq", None), entry("/x/jq", Some("^log$")), entry("**/jq", Some("^log"))];
        let found = |words: &[&str]| find(&list, &executable("/x/jq", words)).map(|entry| entry.arg_pattern());
        assert_eq!(found(&["log"]), Some(Some("^log$")));
        assert_eq!(found(&["log", "-1"]), Some(Some("^log")));
        assert_eq!(found(&["push"]), Some(None));
        assert_eq!(find(&list, &executable("/x/hg", &[])), None);
        assert_eq!(found(&["a\0b"]), None, "it could be two arguments");
    }

    #[test]
    fn an_entry_that_has_lost_its_arguments_lists_nothing() {
        let of = |source: &str| Entry { source: Some(source.to_owned()), ..entry("/x/jq", None) };
        for source in ["allow-always", "Allow-Always", " x"] {
            assert_eq!(find(&[of(source)], &executable("/x/jq", &[])), None);
        }
        for source in ["", " "] {
            assert!(find(&[of(source)], &executable("/x/jq", &[])).is_some());
        }
        let lost = Entry { arg_pattern: Some(String::new()), ..of("allow-always") };
        assert_eq!(find(&[lost], &executable("/x/jq", &[])), None);
    }

    #[test]
    fn interpreters_are_listed_by_their_arguments_and_shells_not_at_all() {
        for (path, by_path, by_arguments) in [
            ("/x/jq", true, true),
            ("/x/python3.12", false, true),
            ("/x/sudo", false, true),
            ("/x/bash", false, false),
            ("/x/pwsh.exe", false, false),
        ] {
            let is_found = |entry| find(&[entry], &executable(path, &["a"])).is_some();
            assert_eq!(is_found(entry(path, None)), by_path, "{path}");
            assert_eq!(is_found(entry("/x/*", None)), by_path, "{path}");
            assert_eq!(is_found(entry("/x/*", Some("^a$"))), by_arguments, "{path}");
        }
    }

    #[test]
    fn a_glob_means_the_real_path_and_a_name_its_links_as_well() {
        let mut linked = executable("/usr/bin/id", &[]);
        linked.called = "/allowed/root/usr/bin/id".into();
        assert!(find(&[entry("/allowed/**", None)], &linked).is_none());
        assert!(find(&[entry("/allowed/root/usr/bin/id", None)], &linked).is_some());
        assert!(find(&[entry("/usr/*/id", None)], &linked).is_some());
    }
}
