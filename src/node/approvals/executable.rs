//! Which program a command line means. What is decided about here is what is started: one absolute path, looked up
//! once.

use std::borrow::Cow;
use std::path::{Component, Path, PathBuf};

use crate::node::capabilities::program;

/// How many `env` in a row are looked through.
const MAX_ENVS: usize = 4;
/// Programs that are never listed: those that run whatever they are told, and the one that says what is listed.
const SHELLS: [&str; 22] = [
    "ash",
    "bash",
    "cmd",
    "csh",
    "dash",
    "elvish",
    "fish",
    "ksh",
    "mksh",
    "nu",
    "openclaw-node",
    "osh",
    "powershell",
    "pwsh",
    "rbash",
    "rksh",
    "sh",
    "tcsh",
    "winnode",
    "xonsh",
    "yash",
    "zsh",
];
/// Programs that take their meaning from their arguments: interpreters, and those that start others. They can be
/// listed with their arguments alone. The list cannot be complete; it is for the mistakes that are easy to make.
const INTERPRETERS: [&str; 165] = [
    "ant",
    "at",
    "awk",
    "batch",
    "bun",
    "bundle",
    "busybox",
    "bwrap",
    "cabal",
    "capsh",
    "cargo",
    "cc",
    "chpst",
    "chroot",
    "chrt",
    "clang",
    "cmake",
    "composer",
    "conda",
    "crontab",
    "cscript",
    "dbus-launch",
    "dbus-run-session",
    "deno",
    "doas",
    "docker",
    "dotnet",
    "ed",
    "emacs",
    "entr",
    "env",
    "expect",
    "fakeroot",
    "find",
    "firejail",
    "flock",
    "g++",
    "gawk",
    "gcc",
    "gdb",
    "gem",
    "ghci",
    "git",
    "gmake",
    "gnuplot",
    "go",
    "gradle",
    "groovy",
    "guile",
    "hg",
    "ionice",
    "java",
    "jshell",
    "julia",
    "kotlin",
    "ld-linux",
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
    "ld.so",
    "less",
    "linux32",
    "linux64",
    "ltrace",
    "lua",
    "luajit",
    "make",
    "man",
    "mawk",
    "maxima",
    "more",
    "mosh",
    "msbuild",
    "mshta",
    "mvn",
    "mysql",
    "nawk",
    "nc",
    "ncat",
    "nice",
    "ninja",
    "node",
    "nodejs",
    "nodemon",
    "nohup",
    "npm",
    "npx",
    "nsenter",
    "nvim",
    "octave",
    "openssl",
    "osascript",
    "parallel",
    "perf",
    "perl",
    "php",
    "pip",
    "pipx",
    "pkexec",
    "pnpm",
    "podman",
    "prlimit",
    "proot",
    "psql",
    "pypy",
    "python",
    "pythonw",
    "r",
    "racket",
    "rake",
    "regsvr32",
    "rscript",
    "rsync",
    "ruby",
    "run-parts",
    "rundll32",
    "runghc",
    "runuser",
    "rustc",
    "sbt",
    "scala",
    "scp",
    "screen",
    "script",
    "sed",
    "setarch",
    "setsid",
    "sftp",
    "socat",
    "sqlite3",
    "ssh",
    "stack",
    "start-stop-daemon",
    "stdbuf",
    "strace",
    "su",
    "sudo",
    "svn",
    "swift",
    "systemctl",
    "systemd-run",
    "tar",
    "taskset",
    "tclsh",
    "tclsh8.6",
    "time",
    "timeout",
    "tmux",
    "toybox",
    "ts-node",
    "tsx",
    "unshare",
    "uv",
    "uvx",
    "valgrind",
    "vi",
    "view",
    "vim",
    "watch",
    "wget",
    "wish",
    "wscript",
    "xargs",
    "xvfb-run",
    "yarn",
    "zip",
];
/// Programs that are another one under each of their names, so that the name they are called by counts.
const MANY_IN_ONE: [&str; 3] = ["busybox", "coreutils", "toybox"];

/// A program with its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Executable {
    /// Its absolute path, of which only the last part may be a link.
    pub path: PathBuf,
    /// Its absolute path as it was called.
    pub called: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
}

/// What may stand for a program in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Its path alone.
    Program,
    /// Its path with its arguments.
    Interpreter,
    /// Nothing.
    Shell,
}

/// Finds the program that a command line starts. An `env` before it is looked through.
///
/// # Errors
/// Why no program is meant, or none that may be started.
pub fn resolve(argv: &[String], cwd: Option<&Path>) -> Result<Executable, &'static str> {
    let (name, args) = without_env(argv)?.split_first().ok_or("executable-resolution-failed")?;
    let called = find(name, cwd).ok_or("executable-resolution-failed")?;
    let path = at_its_place(&called);
    let is_script = |path: &Path| {
        let name = path.to_string_lossy().to_lowercase();
        // Windows takes a name with dots or spaces behind it for the name without them.
        let name = name.trim_end_matches(['.', ' ']);
        name.ends_with(".bat") || name.ends_with(".cmd")
    };
    if is_script(&called) || is_script(&path) {
        // They are run by cmd.exe, which reads their arguments as it likes.
        return Err("batch-file-not-supported");
    }
    Ok(Executable { path, called, args: args.to_vec() })
}

/// The command without `env` before it, as long as that changes nothing.
fn without_env(argv: &[String]) -> Result<&[String], &'static str> {
    let mut rest = argv;
    for _ in 0..=MAX_ENVS {
        let Some((program, args)) = rest.split_first().filter(|(program, _)| base_name(Path::new(program)) == "env")
        else {
            return Ok(rest);
        };
        let args = args.strip_prefix(&["--".to_owned()]).unwrap_or(args);
        match args.first() {
            // Alone it is a program like others.
            None => return Ok(std::slice::from_ref(program)),
            Some(next) if next.is_empty() || next.starts_with('-') || next.contains('=') => break,
            Some(_) => rest = args,
        }
    }
    Err("env-modifiers-not-supported")
}

/// The absolute path of a program.
pub fn find(name: &str, cwd: Option<&Path>) -> Option<PathBuf> {
    if name.contains('\0') || has_odd_separator(name) {
        return None;
    }
    if !name.contains(std::path::is_separator) {
        return program::find(name).map(|path| normalized(&path));
    }
    let folder = std::path::absolute(cwd.unwrap_or(Path::new("."))).ok()?;
    let path = normalized(&folder.join(name));
    path.is_absolute().then_some(path)
}

/// Patterns know one separator, so a name must not hold what only looks like it.
#[cfg(not(windows))]
fn has_odd_separator(name: &str) -> bool {
    name.contains('\\')
}

/// A colon may only follow the letter of a drive, and then a whole path.
#[cfg(windows)]
fn has_odd_separator(name: &str) -> bool {
    name.char_indices().any(|(index, c)| c == ':' && (index != 1 || !name[2..].starts_with(std::path::is_separator)))
}

/// A path without `.` and `..`. It may mean another file than before where there are links, but it is the one that is
/// decided about and started.
fn normalized(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => _ = normal.pop(),
            other => normal.push(other),
        }
    }
    normal
}

/// The same file without links on the way to it. It keeps its own name: what a program does may depend on it.
#[cfg(unix)]
fn at_its_place(path: &Path) -> PathBuf {
    let place = path.parent().and_then(|folder| folder.canonicalize().ok());
    place.zip(path.file_name()).map_or_else(|| path.to_owned(), |(folder, name)| folder.join(name))
}

/// Elsewhere such a path has a form that patterns are not written for.
#[cfg(not(unix))]
fn at_its_place(path: &Path) -> PathBuf {
    path.to_owned()
}

/// What may stand for the program of this path.
pub fn kind(path: &Path) -> Kind {
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let own = kind_of_name(&base_name(path));
    let target = base_name(&target);
    if MANY_IN_ONE.contains(&&*target) { own } else { own.max(kind_of_name(&target)) }
}

fn kind_of_name(name: &str) -> Kind {
    let without_version = name.trim_end_matches(|c: char| c.is_ascii_digit() || matches!(c, '.' | '-' | '_'));
    let is_in = |names: &[&str]| names.contains(&name) || names.contains(&without_version);
    match () {
        () if is_in(&SHELLS) => Kind::Shell,
        () if is_in(&INTERPRETERS) => Kind::Interpreter,
        () => Kind::Program,
    }
}

/// The last part of a path in lower case, without `.exe`.
fn base_name(path: &Path) -> String {
    let text = path.to_string_lossy().to_lowercase();
    let name = text.trim().rsplit(['/', '\\']).next().unwrap_or_default();
    name.strip_suffix(".exe").unwrap_or(name).to_owned()
}

impl Executable {
    /// Whether it is about the setting with which findings of OpenClaw's security audit are hidden. Whoever could
    /// change that unseen could hide every other change.
    pub fn needs_a_human(&self) -> bool {
        let text = self.args.join(" ").to_lowercase();
        let after = |text: &str, word: &str| text.find(word).map(|at| text[at + word.len()..].to_owned());
        after(&text, "security")
            .and_then(|rest| after(&rest, "audit"))
            .is_some_and(|rest| rest.contains("suppressions"))
    }

    /// The command as people read it.
    pub fn display(&self) -> String {
        let path = self.path.to_string_lossy();
        quoted(std::iter::once(&*path).chain(self.args.iter().map(String::as_str)), is_special)
    }
}

/// A command line as text. What `is_quoted` finds in an argument makes it quoted.
pub fn quoted<'a>(argv: impl IntoIterator<Item = &'a str>, is_quoted: fn(char) -> bool) -> String {
    let quote = |argument: &'a str| {
        if !argument.is_empty() && !argument.contains(is_quoted) {
            return Cow::Borrowed(argument);
        }
        Cow::Owned(format!("\"{}\"", argument.replace('"', "\\\"")))
    };
    argv.into_iter().map(quote).collect::<Vec<_>>().join(" ")
}

/// Whether a character means something to a shell.
pub fn is_special(c: char) -> bool {
    " \t\r\n\"'&|;<>()^%!$`*?[]{}~".contains(c)
}

/// Whether a character parts or quotes arguments.
pub fn is_blank_or_quote(c: char) -> bool {
    c.is_whitespace() || c == '"'
}

/// Whether a program is the command interpreter of Windows.
pub fn is_cmd(name: &str) -> bool {
    base_name(Path::new(name)) == "cmd"
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::node::approvals::Folder;

    fn argv(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    fn path(words: &[&str], cwd: &str) -> Result<String, &'static str> {
        resolve(&argv(words), Some(Path::new(cwd))).map(|executable| executable.called.display().to_string())
    }

    #[test]
    fn a_program_is_looked_up_once_and_named_in_full() {
        let found = path(&["sh", "-c"], "/").unwrap();
        assert!(found.starts_with('/') && found.ends_with("/sh"), "{found}");
        for (name, cwd, expected) in [
            ("./a", "/w", "/w/a"),
            ("b/../a", "/w", "/w/a"),
            ("../../../a", "/w", "/a"),
            ("/usr/bin/../../tmp//./a", "/w", "/tmp/a"),
        ] {
            assert_eq!(path(&[name], cwd).unwrap(), expected);
        }
        for name in ["no-such-program", "..", "a\\b", "/tmp/a\\b", "/a\0b", ""] {
            assert_eq!(path(&[name], "/w"), Err("executable-resolution-failed"), "{name:?}");
        }
        for name in ["/a/x.bat", "/a/X.Cmd", "./x.cmd . ."] {
            assert_eq!(path(&[name], "/w"), Err("batch-file-not-supported"), "{name:?}");
        }
    }

    #[test]
    fn links_on_the_way_are_followed_and_the_name_is_kept() {
        let folder = Folder::new();
        let real = folder.0.join("real");
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, folder.0.join("link")).unwrap();
        std::os::unix::fs::symlink("/bin/sh", real.join("tool")).unwrap();
        let executable = resolve(&argv(&["link/tool", "x"]), Some(&folder.0)).unwrap();
        assert_eq!(executable.called, folder.0.join("link/tool"));
        assert_eq!(executable.path, real.canonicalize().unwrap().join("tool"));
        assert_eq!((executable.args, kind(&executable.path)), (argv(&["x"]), Kind::Shell));
    }

    #[test]
    fn env_is_looked_through_only_if_it_changes_nothing() {
        for words in [&["env", "/a", "-x"][..], &["/usr/bin/env", "--", "/a", "-x"], &["env", "env", "/a", "-x"]] {
            let executable = resolve(&argv(words), None).unwrap();
            assert_eq!((executable.path, executable.args), (PathBuf::from("/a"), argv(&["-x"])), "{words:?}");
        }
        for words in [
            &["env", "-i", "/a"][..],
            &["env", "-", "/a"],
            &["env", "--", "-u"],
            &["env", "X=1", "/a"],
            &["env", "--", "X=1", "/a"],
            &["env", "env", "-S", "/a"],
            &["env", "", "/a"],
            &["env", "env", "env", "env", "env", "/a"],
        ] {
            assert_eq!(resolve(&argv(words), None), Err("env-modifiers-not-supported"), "{words:?}");
        }
        let alone = resolve(&argv(&["/usr/bin/env"]), None).unwrap();
        assert_eq!((alone.called.to_str(), kind(&alone.called)), (Some("/usr/bin/env"), Kind::Interpreter));
    }

    #[test]
    fn shells_and_interpreters_are_known_by_their_names() {
        assert!(SHELLS.is_sorted() && INTERPRETERS.is_sorted());
        for (name, expected) in [
            ("/x/bash", Kind::Shell),
            ("/x/BASH.exe", Kind::Shell),
            ("/x/python3.12", Kind::Interpreter),
            ("/x/node-22", Kind::Interpreter),
            ("/x/jq", Kind::Program),
            ("/x/git", Kind::Interpreter),
            ("/x/winnode.exe", Kind::Shell),
            ("/x/pythonic", Kind::Program),
            ("/x/7z", Kind::Program),
        ] {
            assert_eq!(kind(Path::new(name)), expected, "{name}");
        }
    }

    #[test]
    fn hiding_findings_of_the_audit_needs_a_human() {
        let needs = |words: &[&str]| resolve(&argv(words), None).unwrap().needs_a_human();
        assert!(needs(&["/o", "config", "set", "Security.Audit.Suppressions", "[]"]));
        assert!(needs(&["/o", "config", "patch", r#"{"security":{"audit":{"suppressions":[]}}}"#]));
        assert!(!needs(&["/o", "security", "audit"]));
        assert!(!needs(&["/o", "suppressions", "audit", "security"]));
    }
}
