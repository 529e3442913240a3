// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package kubernetes has the manifests that agent and operator need in a cluster beside the CRDs.
package kubernetes

import _ "embed"

// RBAC is the agent's service account with its rights.
//
//go:embed rbac.yaml
var RBAC []byte

// OperatorRBAC is the operator's service account with its rights.
//
//go:embed operator-rbac.yaml
var OperatorRBAC []byte

// ViewerRBAC are the rights that the kubectl plugin ndev takes.
//
//go:embed viewer-rbac.yaml
var ViewerRBAC []byte

// CiliumNodeCRD is a definition of CiliumNode for clusters without Cilium.
//
//go:embed ciliumnode-crd.yaml
var CiliumNodeCRD []byte
