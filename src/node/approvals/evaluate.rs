//! What becomes of a command under a policy: a table without side effects.

use super::policy::{Ask, Policy, Security};

/// Why a command is refused, in the words of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("exec-approvals-v2: {code:?} ({reason})")]
pub struct Refusal {
    /// The kind.
    pub code: Code,
    /// The case.
    pub reason: &'static str,
}

/// The kinds of refusals. Their names are those of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// Nothing may run.
    SecurityDeny,
    /// Nobody is to be asked.
    AskDeny,
    /// It is not listed.
    AllowlistMiss,
    /// Whoever was asked said no, or there was nobody to say yes.
    UserDenied,
    /// The request is wrong, or the policy has changed.
    ValidationFailed,
    /// It is not clear which program is meant.
    ResolutionFailed,
    /// Something here is broken.
    InternalError,
}

impl Refusal {
    /// A refusal.
    pub fn new(code: Code, reason: &'static str) -> Self {
        Refusal { code, reason }
    }
}

/// What somebody says who is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Run it this time.
    Once,
    /// Do not.
    No,
}

/// Where the table leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It runs.
    Allow,
    /// Somebody must be asked.
    Prompt,
    /// It does not.
    Refuse(Refusal),
}

/// The table. Its first row that fits counts.
pub fn evaluate(policy: &Policy, is_listed: bool, needs_a_human: bool, answer: Option<Answer>) -> Verdict {
    use Verdict::{Allow, Prompt, Refuse};
    let is_missed = policy.security == Security::Allowlist && !is_listed;
    let is_asked = needs_a_human || policy.ask == Ask::Always || (policy.ask == Ask::OnMiss && is_missed);
    match answer {
        _ if policy.security == Security::Deny => Refuse(Refusal::new(Code::SecurityDeny, "security=deny")),
        Some(Answer::No) => Refuse(Refusal::new(Code::UserDenied, "user-denied")),
        Some(Answer::Once) => Allow,
        None if is_asked => Prompt,
        None if is_missed => Refuse(Refusal::new(Code::AllowlistMiss, "allowlist-miss")),
        None if policy.ask == Ask::Deny && !is_listed => Refuse(Refusal::new(Code::AskDeny, "ask=deny")),
        None => Allow,
    }
}

/// The answer that stands for nobody's.
pub fn fallback(policy: &Policy, is_listed: bool, needs_a_human: bool) -> Answer {
    match policy.security.min(policy.ask_fallback) {
        _ if needs_a_human => Answer::No,
        Security::Full => Answer::Once,
        Security::Allowlist if is_listed => Answer::Once,
        Security::Allowlist | Security::Deny => Answer::No,
    }
}

/// Decides where nobody can be asked.
///
/// # Errors
/// [`Refusal`] if the command must not be run.
pub fn decide(policy: &Policy, is_listed: bool, needs_a_human: bool) -> Result<(), Refusal> {
    let verdict = match evaluate(policy, is_listed, needs_a_human, None) {
        Verdict::Prompt => evaluate(policy, is_listed, needs_a_human, Some(fallback(policy, is_listed, needs_a_human))),
        verdict => verdict,
    };
    match verdict {
        Verdict::Allow => Ok(()),
        Verdict::Refuse(refusal) => Err(refusal),
        Verdict::Prompt => Err(Refusal::new(Code::InternalError, "second-pass-requires-prompt")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECURITIES: [Security; 3] = [Security::Deny, Security::Allowlist, Security::Full];
    const ASKS: [Ask; 4] = [Ask::Off, Ask::OnMiss, Ask::Always, Ask::Deny];

    fn policy(security: Security, ask: Ask, ask_fallback: Security) -> Policy {
        Policy { security, ask, ask_fallback, ..Policy::default() }
    }

    #[test]
    fn a_refusal_has_its_form() {
        let refusal = Refusal::new(Code::AllowlistMiss, "allowlist-miss");
        assert_eq!(refusal.to_string(), "exec-approvals-v2: AllowlistMiss (allowlist-miss)");
    }

    #[test]
    fn what_runs_without_anybody_is_this_and_no_more() {
        let refused = |code, reason| Err(Refusal::new(code, reason));
        for security in SECURITIES {
            for ask in ASKS {
                for ask_fallback in SECURITIES {
                    for is_listed in [false, true] {
                        let policy = policy(security, ask, ask_fallback);
                        let by_fallback = match (ask_fallback, security) {
                            (Security::Deny, _) => false,
                            (Security::Full, Security::Full) => true,
                            _ => is_listed,
                        };
                        let expected = match (security, ask) {
                            (Security::Deny, _) => refused(Code::SecurityDeny, "security=deny"),
                            (_, Ask::Always) if by_fallback => Ok(()),
                            (_, Ask::Always) => refused(Code::UserDenied, "user-denied"),
                            _ if is_listed => Ok(()),
                            (Security::Full, Ask::Off | Ask::OnMiss) => Ok(()),
                            (Security::Full, Ask::Deny) => refused(Code::AskDeny, "ask=deny"),
                            (Security::Allowlist, Ask::OnMiss) => refused(Code::UserDenied, "user-denied"),
                            (Security::Allowlist, Ask::Off | Ask::Deny) => {
                                refused(Code::AllowlistMiss, "allowlist-miss")
                            }
                        };
                        assert_eq!(decide(&policy, is_listed, false), expected, "{policy:?} {is_listed}");
                        assert!(decide(&policy, is_listed, true).is_err(), "{policy:?} {is_listed}");
                    }
                }
            }
        }
    }

    #[test]
    fn without_a_file_a_listed_command_runs_and_no_other() {
        assert_eq!(decide(&Policy::default(), true, false), Ok(()));
        let refusal = decide(&Policy::default(), false, false).unwrap_err();
        assert_eq!(refusal.to_string(), "exec-approvals-v2: UserDenied (user-denied)");
    }

    #[test]
    fn an_answer_overrules_all_but_security() {
        for ask in ASKS {
            for is_listed in [false, true] {
                let ask_about =
                    |security, answer| evaluate(&policy(security, ask, Security::Deny), is_listed, false, Some(answer));
                assert_eq!(ask_about(Security::Allowlist, Answer::Once), Verdict::Allow);
                assert!(matches!(ask_about(Security::Full, Answer::No), Verdict::Refuse(_)));
                assert!(matches!(ask_about(Security::Deny, Answer::Once), Verdict::Refuse(_)));
            }
        }
    }
}
