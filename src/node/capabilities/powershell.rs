//! Windows PowerShell, for what only .NET reaches. A script is a constant; what differs from run to run goes in by the
//! environment or by stdin, so that no value can become a command.

use tokio::process::Command;

use super::program::find;

/// Whether it is there.
pub(super) fn is_there() -> bool {
    find(PROGRAM).is_some()
}

/// A run of `script` that reads `values` from its environment.
pub(super) fn command(script: &str, values: &[(&str, &str)]) -> Option<Command> {
    let mut command = Command::new(find(PROGRAM)?);
    command.args(["-NoLogo", "-NoProfile", "-NonInteractive", "-Command", script]);
    command.envs(values.iter().copied());
    Some(command)
}

const PROGRAM: &str = "powershell";
