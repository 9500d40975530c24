//! Which commit the programs say that they are of.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn output(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn every_program_says_its_version_and_its_commit() {
    let said = [
        env!("CARGO_BIN_EXE_openclaw-mcp-proxy"),
        env!("CARGO_BIN_EXE_openclaw-mcp-stdio"),
        env!("CARGO_BIN_EXE_openclaw-node"),
        env!("CARGO_BIN_EXE_winnode"),
    ]
    .map(|program| {
        let said = output(Command::new(program).arg("--version"));
        let name = Path::new(program).file_stem().unwrap().to_str().unwrap();
        said.strip_prefix(name).expect(&said).to_owned()
    });
    assert!(said.iter().all(|version| *version == said[0]), "{said:?}");
    // The commit is there wherever this is a checkout; that it is the right one, the next test shows.
    let is_checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join(".git").exists();
    let commit = said[0].strip_prefix(&format!(" {VERSION}")).expect(&said[0]);
    assert!(!is_checkout || commit.starts_with(" (") && commit.ends_with(')'), "{commit}");
}

/// A small program with our build script.
struct Package {
    folder: PathBuf,
}

impl Drop for Package {
    fn drop(&mut self) {
        let _left_behind = std::fs::remove_dir_all(&self.folder);
    }
}

impl Package {
    fn new() -> Self {
        // Outside of this very repository.
        let folder = std::env::temp_dir().join(format!("openclaw-version-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir_all(folder.join("src")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        write("build.rs", include_str!("../build.rs"));
        write("Cargo.toml", "[package]\nname = \"p\"\nversion = \"1.2.3\"\nedition = \"2024\"\n[workspace]\n");
        write("src/main.rs", "fn main() { println!(\"{}\", env!(\"OPENCLAW_VERSION\")) }\n");
        write(".gitignore", "target\n");
        Package { folder }
    }

    /// Builds it and asks it.
    fn version(&self, given: Option<&str>) -> String {
        let mut build = self.command(env!("CARGO"));
        build.args(["build", "--quiet", "--offline"]).env_remove("CARGO_TARGET_DIR");
        match given {
            Some(commit) => build.env("OPENCLAW_BUILD_COMMIT", commit),
            None => build.env_remove("OPENCLAW_BUILD_COMMIT"),
        };
        output(&mut build);
        output(&mut Command::new(self.folder.join("target/debug/p")))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.folder);
        command
    }

    fn git(&self, arguments: &[&str]) -> String {
        output(
            self.command("git")
                .args(["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"])
                .args(arguments),
        )
    }

    fn commit(&self) -> String {
        self.git(&["add", "-A"]);
        self.git(&["commit", "--quiet", "--allow-empty", "-m", "c"]);
        format!("1.2.3 ({})", &self.git(&["rev-parse", "HEAD"])[..12])
    }

    /// When the program was built.
    fn built(&self) -> std::time::SystemTime {
        std::fs::metadata(self.folder.join("target/debug/p")).unwrap().modified().unwrap()
    }
}

#[test]
fn the_commit_is_that_of_the_checkout_and_nothing_is_built_anew_for_nothing() {
    let package = Package::new();
    assert_eq!(package.version(None), "1.2.3", "there is no repository");
    assert_eq!(package.version(Some("0123456789abcdef")), "1.2.3 (0123456789ab)");
    assert_eq!(package.version(Some("a b\n")), "1.2.3", "it would break the line");
    package.git(&["init", "--quiet"]);
    // A build script cannot watch for a repository that is not there.
    std::fs::remove_dir_all(package.folder.join("target")).unwrap();
    let first = package.commit();
    assert_eq!(package.version(None), first);
    let built = package.built();
    assert_eq!(package.version(None), first);
    assert_eq!(package.built(), built, "nothing has changed");
    let second = package.commit();
    assert_eq!(package.version(None), second);
    package.git(&["checkout", "--quiet", "HEAD~"]);
    assert_eq!(package.version(None), first);
    package.git(&["checkout", "--quiet", "-"]);
    package.git(&["pack-refs", "--all"]);
    assert_eq!(package.version(None), second);
    let third = package.commit();
    assert_eq!(package.version(None), third);
    assert_eq!(package.version(Some("v1")), "1.2.3 (v1)", "whoever says it is believed");
}

#[test]
fn a_copy_within_another_repository_does_not_take_its_commit() {
    let outer = Package::new();
    outer.git(&["init", "--quiet"]);
    outer.commit();
    let mut inner = Package::new();
    let moved = outer.folder.join("vendored");
    std::fs::rename(&inner.folder, &moved).unwrap();
    inner.folder = moved;
    assert_eq!(inner.version(None), "1.2.3");
}
