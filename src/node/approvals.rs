//! Which programs `system.run` may start: the owner's policy, and the decisions that follow from it.
//!
//! The policy is a file, [`policy`], that [`store`] finds where [`location`] says. It is read anew for each decision if
//! [`disk`] trusts it, and written without losing what another process has written. [`executable`] says which program a
//! command line means, [`matcher`] whether it is listed, [`evaluate`] what becomes of it. Nobody sits in front of a
//! node, so there is no prompt: where one would be due, the policy's fallback decides. What a client may change of the
//! policy from afar is in [`update`]: it can only be made stricter. The owner changes it with [`cli`].

pub mod cli;
pub mod disk;
pub mod evaluate;
pub mod executable;
pub mod location;
pub mod matcher;
pub mod policy;
pub mod store;
pub mod update;

use std::path::Path;

use evaluate::{Code, Refusal};
use executable::Executable;
use policy::{Entry, Policy};
use store::Store;

/// A command that may be run.
#[derive(Debug, Clone, PartialEq)]
pub struct Approved {
    /// What is started, and with which arguments.
    pub executable: Executable,
    /// The entry that lists it.
    pub entry: Option<Entry>,
}

/// Decides about a command.
///
/// # Errors
/// [`Refusal`] if it must not be run.
pub fn approve(store: &Store, argv: &[String], cwd: Option<&Path>, agent: Option<&str>) -> Result<Approved, Refusal> {
    let policy = store.policy(agent);
    let executable = executable::resolve(argv, cwd).map_err(|reason| Refusal::new(Code::ResolutionFailed, reason))?;
    let approved = decide(&policy, executable)?;
    // The owner may have revoked it while slow folders were searched.
    if !policy.still_holds(&store.policy(agent), approved.entry.as_ref()) {
        return Err(Refusal::new(Code::ValidationFailed, "policy-changed-before-execution"));
    }
    Ok(approved)
}

/// Decides about a program whose place is known.
///
/// # Errors
/// [`Refusal`] if it must not be run.
pub fn decide(policy: &Policy, executable: Executable) -> Result<Approved, Refusal> {
    let entry = matcher::find(&policy.allowlist, &executable).cloned();
    evaluate::decide(policy, entry.is_some(), executable.needs_a_human())?;
    Ok(Approved { executable, entry })
}

/// A folder of one test, removed at its end.
#[cfg(test)]
pub(crate) struct Folder(pub(crate) std::path::PathBuf);

#[cfg(test)]
impl Folder {
    pub(crate) fn new() -> Self {
        let name = format!("openclaw-approvals-{}", super::private_file::random::<9>().unwrap());
        let folder = std::env::temp_dir().canonicalize().unwrap().join(name);
        std::fs::create_dir(&folder).unwrap();
        Folder(folder)
    }
}

#[cfg(test)]
impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}
