//! Finds out which commit is built, for `--version`: `OPENCLAW_BUILD_COMMIT` says so where there is no repository (in an
//! image, from an archive), else git does if this folder is the root of a checkout. Else only the version is shown.
//!
//! Nothing else goes in, no time and no machine: the same commit builds the same programs.

use std::path::{Path, PathBuf};
use std::process::Command;

/// How many digits of a commit are shown: always as many, while git's own short form grows with a repository.
const DIGITS: usize = 12;

fn main() {
    println!("cargo::rerun-if-env-changed=OPENCLAW_BUILD_COMMIT");
    let given = std::env::var("OPENCLAW_BUILD_COMMIT").ok().filter(|commit| !commit.is_empty());
    let is_commit = |commit: &String| commit.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    let commit = given.or_else(commit).filter(is_commit);
    let version = env!("CARGO_PKG_VERSION");
    match commit {
        Some(commit) => {
            let short: String = commit.chars().take(DIGITS).collect();
            println!("cargo::rustc-env=OPENCLAW_VERSION={version} ({short})");
        }
        None => println!("cargo::rustc-env=OPENCLAW_VERSION={version}"),
    }
}

/// The commit of the checkout whose root this folder is. Not of one further up, into which it was only copied.
fn commit() -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).canonicalize().ok()?;
    let checkout = PathBuf::from(git(&["rev-parse", "--show-toplevel"])?).canonicalize().ok()?;
    if checkout != root {
        return None;
    }
    // HEAD changes with the branch, its log and the branch's own file with each commit. Only what is there may be
    // named: cargo takes a file that is missing for one that has changed.
    let branch = git(&["symbolic-ref", "-q", "HEAD"]);
    for name in ["HEAD", "logs/HEAD", "packed-refs"].into_iter().chain(branch.as_deref()) {
        let path = git(&["rev-parse", "--git-path", name]).map(|path| root.join(path));
        if let Some(path) = path.filter(|path| path.exists()) {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    git(&["rev-parse", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    // A hook of another repository may have set them.
    command.args(arguments).env_remove("GIT_DIR").env_remove("GIT_WORK_TREE").current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
