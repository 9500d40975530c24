//! Bearer tokens: how they are kept, and the only place where they are compared.

use std::fmt;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// A secret from the settings. It has no `Display`, and its `Debug` says only whether it is set.
#[derive(Clone, Default, serde::Deserialize)]
#[serde(transparent)]
pub struct Token(String);

impl Token {
    /// Wraps a secret.
    pub fn new(secret: impl Into<String>) -> Self {
        Token(secret.into())
    }

    /// Whether no token is set: the seed's rule is that such an endpoint asks for none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The secret itself, to be sent to a server.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_empty() { "Token(none)" } else { "Token(***)" })
    }
}

/// Why a request is not let in. The texts are for its sender and never hold what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// No `Authorization: Bearer …`.
    #[error("A bearer token is missing: send 'Authorization: Bearer <token>'.")]
    Missing,
    /// Another token than the one expected.
    #[error("The bearer token is not valid for this endpoint.")]
    Invalid,
    /// The client sent the name of a variable instead of its value.
    #[error("The bearer token is a literal ${{…}}: the client did not expand a variable of its configuration.")]
    NotExpanded,
}

/// What requests of one role (apps, or MCP clients) must present.
#[derive(Debug, Clone)]
pub struct Guard {
    /// SHA-256 of the token; `None` lets everybody in.
    expected: Option<[u8; 32]>,
}

impl Guard {
    /// Demands `token`, or nothing if it is empty.
    pub fn new(token: &Token) -> Self {
        Guard { expected: (!token.is_empty()).then(|| Sha256::digest(&token.0).into()) }
    }

    /// Whether everybody is let in.
    pub fn is_open(&self) -> bool {
        self.expected.is_none()
    }

    /// Checks a request's `Authorization` header.
    ///
    /// # Errors
    /// [`Denied`] if the token is missing or another one.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), Denied> {
        self.check_token(bearer_token(headers))
    }

    /// Checks a token that came by another way than the header.
    ///
    /// # Errors
    /// [`Denied`] if the token is missing or another one.
    pub fn check_token(&self, token: Option<&[u8]>) -> Result<(), Denied> {
        let Some(expected) = &self.expected else { return Ok(()) };
        let token = token.ok_or(Denied::Missing)?;
        // Hashing makes both sides equally long, so that the comparison tells nothing of the token's length.
        let given: [u8; 32] = Sha256::digest(token).into();
        if given.ct_eq(expected).into() {
            Ok(())
        } else if token.starts_with(b"${") {
            Err(Denied::NotExpanded)
        } else {
            Err(Denied::Invalid)
        }
    }
}

/// The token of `Authorization: Bearer <token>`; the scheme's case does not matter (RFC 9110 section 11.1).
pub fn bearer_token(headers: &HeaderMap) -> Option<&[u8]> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked(7)?;
    let token = token.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_never_shows_in_debug_output() {
        let token = Token::new("canary");
        assert!(!format!("{token:?} {:?}", Guard::new(&token)).contains("canary"));
    }

    #[test]
    fn only_the_exact_token_opens_a_guard() {
        let guard = Guard::new(&Token::new("secret"));
        let check = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().unwrap());
            guard.check(&headers)
        };
        assert_eq!(guard.check(&HeaderMap::new()), Err(Denied::Missing));
        for good in ["Bearer secret", "bearer secret", "BEARER  secret "] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["Bearer secre", "Bearer secrets", "Bearer Secret"] {
            assert_eq!(check(bad), Err(Denied::Invalid), "{bad}");
        }
        for none in ["Bearer ", "Bearer", "secret", "Basic secret", ""] {
            assert_eq!(check(none), Err(Denied::Missing), "{none}");
        }
        assert_eq!(check("Bearer ${OPENCLAW_PROXY_OPENCLAW_TOKEN}"), Err(Denied::NotExpanded));
    }

    #[test]
    fn an_empty_token_lets_everybody_in() {
        let guard = Guard::new(&Token::default());
        assert!(guard.is_open());
        assert_eq!(guard.check(&HeaderMap::new()), Ok(()));
    }
}
