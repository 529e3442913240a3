// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package kubernetes has the manifests that the agent needs in a cluster beside the CRDs.
package kubernetes

import _ "embed"

// RBAC is the agent's service account with its rights.
//
//go:embed rbac.yaml
var RBAC []byte
