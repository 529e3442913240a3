// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/cilium/networkdriver/internal/testenv"
)

func TestAPIControlPlane(t *testing.T) {
	cp, err := StartControlPlane(t.Context(), ControlPlaneOptions{Dir: t.TempDir(), Bin: []string{testenv.KubeBin(t)}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cp.Stop()) })

	client, err := cp.Client()
	require.NoError(t, err)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	_, err = client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{})
	require.NoError(t, err, "a pod without a service account")
	_, err = client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err, "dynamic resource allocation is served")

	// RBAC is on: a user without rights may not read the pod.
	cfg, err := cp.UserRESTConfig("somebody")
	require.NoError(t, err)
	somebody, err := kubernetes.NewForConfig(cfg)
	require.NoError(t, err)
	_, err = somebody.CoreV1().Pods("default").Get(t.Context(), "p", metav1.GetOptions{})
	require.True(t, apierrors.IsForbidden(err), "%v", err)

	// The data outlives the API server, and the audit log names who asked.
	require.NoError(t, cp.StopProgram(APIServer))
	require.NoError(t, cp.Start(t.Context(), APIServer))
	_, err = client.CoreV1().Pods("default").Get(t.Context(), "p", metav1.GetOptions{})
	require.NoError(t, err)
	audit, err := os.ReadFile(cp.AuditLog())
	require.NoError(t, err)
	require.True(t, strings.Contains(string(audit), `"username":"somebody"`))

	processes := cp.processes.All()
	require.Len(t, processes, 2)
	for _, p := range processes {
		require.True(t, p.Alive())
	}
}

func TestControlPlaneThatCannotStart(t *testing.T) {
	_, err := StartControlPlane(t.Context(), ControlPlaneOptions{Dir: t.TempDir(), Bin: []string{t.TempDir()}})
	require.ErrorContains(t, err, "program etcd is not in")
	_, err = StartControlPlane(t.Context(), ControlPlaneOptions{})
	require.ErrorContains(t, err, "no directory")
}
